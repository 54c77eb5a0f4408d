"""What only the papers need: `kendall reproduce`, formulas as printed, their measurements."""
