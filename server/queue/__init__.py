"""The dispatch loop, its sequences and those who observe it."""
