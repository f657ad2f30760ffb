from __future__ import annotations

import re
from pathlib import Path

import benchmarks


def test_the_package_names_every_command_and_no_other() -> None:
    folder = Path(benchmarks.__file__).parent
    commands = {path.stem for path in folder.glob("*.py") if '__name__ == "__main__"' in path.read_text("utf-8")}
    assert benchmarks.__doc__ is not None
    assert set(re.findall(r"`([a-z_]+)`", benchmarks.__doc__)) == commands
