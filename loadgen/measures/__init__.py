"""What a record, or many, come to: durations, goodput, failures, what is missing."""
