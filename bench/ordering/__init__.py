"""Orders of service on a real engine, beside what the law predicts of them."""
