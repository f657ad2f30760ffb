"""For runs that may be cut short: `-p tests.cut_short` tells of a failure when it happens, and ends the run at SIGTERM
with its summary, as Ctrl-C does. Give `--tb=no` with it, or the end repeats it all."""

from __future__ import annotations

import signal

import pytest


class _Failures:
    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_sep("_", f"{report.nodeid} ({report.when})")
            self._terminal.write_line(report.longreprtext)
            for name, text in report.sections:
                self._terminal.write_line(f"{name}:\n{text[-2000:]}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:  # none in a worker of xdist, which reports to who started it
        config.pluginmanager.register(_Failures(terminal))
