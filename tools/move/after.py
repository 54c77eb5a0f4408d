"""What the move changes besides names: the contracts of the rooms, and the groups of the mutants. In the checkout."""

from pathlib import Path

CONTRACTS = """[[tool.importlinter.contracts]]
name = "the rooms of the mathematics import one way"
type = "layers"
layers = [
  "queueing.commands",
  "queueing.papers | queueing.control",
  "queueing.estimation | queueing.optimization",
  "queueing.prediction",
  "queueing.bounds | queueing.answer_check | queueing.simulation",
  "queueing.model",
  "queueing.models",
  "queueing.latency",
  "queueing.distributions",
  "queueing.measurement",
  "queueing.result | queueing.errors",
]

[[tool.importlinter.contracts]]
name = "the rooms of the load generator import one way"
type = "layers"
layers = [
  "loadgen.commands",
  "loadgen.sweep",
  "loadgen.report",
  "loadgen.compare",
  "loadgen.gateway",
  "loadgen.sending",
  "loadgen.measures",
  "loadgen.arrivals",
]
ignore_imports = [  # the types of what a report of a sweep shows
  "loadgen.report.html.data -> loadgen.sweep.results",
  "loadgen.report.html.files -> loadgen.sweep.results",
]

[[tool.importlinter.contracts]]
name = "engines know nothing of what uses them"
type = "forbidden"
source_modules = ["server.engines", "server.runtime"]
forbidden_modules = ["server.http", "server.queue", "server.admission", "server.supervision", "server.live", "server.gateway"]
ignore_imports = ["server.telemetry.logs -> server.http.schema"]  # a type

"""
GROUPS = """[groups]
"policies" = ["policies"]
"batcher" = ["server/queue", "server/gateway.py", "server/engines/emulated.py"]
"overload and security" = ["server/admission", "server/security"]
"supervision" = ["server/supervision"]
"estimation, autopilot, advice" = ["queueing/estimation", "queueing/control", "queueing/optimization"]
"load generator" = ["loadgen"]
"simulation and audit" = ["queueing/simulation", "queueing/measurement"]
"exact chains" = ["queueing/models"]

"""
NEXT = '[[tool.importlinter.contracts]]\nname = "the mathematics and the policies know no clock'

project, mutants = Path("pyproject.toml"), Path("tools/mutants.toml")
project.write_text(project.read_text().replace(NEXT, CONTRACTS + NEXT))
before, _, rest = mutants.read_text().partition("[groups]")
mutants.write_text(before + GROUPS + rest[rest.index("[[known]]") :])
