"""Start and stop: options, configuration, serving, reloading."""
