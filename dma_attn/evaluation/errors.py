"""What is wrong with a setting of a measurement, with the names of the settings at fault."""

from __future__ import annotations


class SettingError(ValueError):
    """A setting that cannot work, found before the measurement starts.

    `settings` are the names, as in `DemoSettings` and `generate_answer`, of what would help;
    `problem` is the message without them.
    """

    def __init__(self, problem: str, *settings: str) -> None:
        super().__init__(f"{', '.join(settings)}: {problem}")
        self.problem = problem
        self.settings = settings
