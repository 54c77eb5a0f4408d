"""The live gateway: HTTP in, a queue under a policy, an engine, tokens and measurements out."""
