"""What the exercise notebooks import, and the grading of what students hand in."""

from course_lib.exercises.checks import WrongAnswer, check

__all__ = ["WrongAnswer", "check"]
