"""Two examples of each command, for its help."""

LAW = "k1=0.001,k2=0.004,k3=0.0001,k4=0.002"
LENGTHS = "lognormal:mu=5,sigma=0.7"
QUEUE = f"--arrival-rate 0.5 --output-tokens {LENGTHS} --latency {LAW}"
EXAMPLES = {
    "demo": ("kendall demo --once", "kendall demo --model smollm2"),
    "serve": (
        "kendall serve tiny",
        "kendall serve Qwen/Qwen3-0.6B --policy capped:max_batch_size=8 --slo "
        "p99_queueing_delay=2s",
    ),
    "load": (
        "kendall load --request-rate 5 --num-prompts 500",
        "kendall load --trace trace.csv --time-scale 0.5 --save-result",
    ),
    "summary": (
        "kendall summary runs/load-0.jsonl",
        "kendall summary runs/load-0.jsonl --goodput ttft:100ms",
    ),
    "sweep": (
        "kendall sweep single dynamic --loads 0.3,0.6",
        "kendall sweep --resume runs/sweep",
    ),
    "compare": ("kendall compare gateway.jsonl", "kendall compare --sweep runs/sweep"),
    "audit": ("kendall audit runs/load-0.jsonl", "kendall audit runs/load-0.jsonl --json"),
    "calibrate": (
        "kendall calibrate http://localhost:8080",
        "kendall calibrate tiny --output tiny.json",
    ),
    "predict": (
        f"kendall predict --policy single {QUEUE}",
        f"kendall predict --policy continuous:max_batch_size=32 {QUEUE} --slo p99_ttft=500ms",
    ),
    "simulate": (
        f"kendall simulate --policy dynamic {QUEUE}",
        f"kendall simulate --policy fixed:batch_size=8 {QUEUE} --replications 4 --json",
    ),
    "check-policy": (
        "kendall check-policy dynamic:order=spjf",
        "kendall check-policy capped:max_batch_size=8",
    ),
    "policies": ("kendall policies", "kendall policies --json"),
    "profiles": ("kendall profiles", "kendall profiles --json"),
    "optimize": (
        f"kendall optimize --target batch-size --policy capped:max_batch_size=1 {QUEUE}",
        f"kendall optimize --target servers {QUEUE} --slo p99_queueing_delay=2s",
    ),
    "plan": (
        f"kendall plan --slo p99_ttft=500ms {QUEUE}",
        f"kendall plan --slo p99_ttft=500ms,p99_itl=50ms {QUEUE} --max-num-seqs 16,64",
    ),
    "advise": (
        "kendall advise http://localhost:8080 --target batch-size",
        "kendall advise http://localhost:8080 --target policy --slo p99_queueing_delay=2s",
    ),
    "watch": (
        "kendall watch http://localhost:8000 --once --for 60s",
        "kendall watch --prometheus http://localhost:9090 --since 7d --output record.html",
    ),
    "reproduce": ("kendall reproduce inoue-fig2", "kendall reproduce all --output pictures"),
}
