"""The engine: its own loop and thread, the scheduler, and the runners."""
