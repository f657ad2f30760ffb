"""An engine in a process of its own: the same core, behind the same `AsyncEngine`."""
