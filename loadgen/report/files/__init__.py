"""Result files of other tools, and our own."""
