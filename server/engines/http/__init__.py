"""Any server with OpenAI's API as an engine: calls are passed on as bytes."""
