"""Where a setting comes from: its default, then a TOML file, then KENDALL_<OPTION>, then a flag;
the later wins.

typer knows defaults, environment and flags; a file is one more layer of defaults
(`Context.default_map`).
"""
