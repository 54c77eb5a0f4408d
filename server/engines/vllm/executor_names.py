"""Environment variables by which the gateway speaks to the EngineCore process it starts."""

GATEWAY_PID = "KENDALL_GATEWAY_PID"
ERROR_FILE = "KENDALL_ENGINE_ERROR_FILE"
