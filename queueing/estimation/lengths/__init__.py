"""How long prompts and answers are: estimates, the epochs they are taken from, beyond the limit."""
