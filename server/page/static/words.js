// The field's words for what the gateway names.

export const ASSUMPTIONS = {
  all_admitted: ["All admitted", "the gateway refuses a part of the calls"],
  no_retries: ["No retries", "clients retry"],
  open_loop: ["Open loop", "clients wait for their answers before they send more"],
  settled: ["Settled queue", "the queue is still settling after the last change"],
  stable_queue: ["Stable queue", "more arrives than can be served"],
  constant_rate: ["Constant rate", "the arrival rate changed"],
  poisson_arrivals: ["Poisson arrivals", "arrivals are not Poisson"],
  independent_lengths: ["Independent lengths", "the answers to one call are as long as each other"],
  equal_servers: ["Equal servers", "the servers are not equally fast"],
  no_stalls: ["No stalls", "a few very long batches hold the engine"],
  constant_speed: ["Constant speed", "the engine’s speed changes"],
  law_shape: ["Shape of the law", "the engine does not follow its calibrated law"],
  enough_memory: ["Enough memory", "requests wait for the engine’s KV memory"],
};

/** Of an assumption without a title of its own its name. */
export function titleOf(name) {
  const plain = name.replaceAll("_", " ");
  return ASSUMPTIONS[name]?.[0] ?? plain[0].toUpperCase() + plain.slice(1);
}

/** Requests without an answer, by what became of them. */
export const LOSSES = {
  refused_rate_limit_rate: "Refused: rate limit",
  refused_max_num_queued_reqs_rate: "Refused: queue full",
  refused_max_num_queued_tokens_rate: "Refused: too many prompt tokens",
  refused_adaptive_concurrency_rate: "Refused: concurrency limit",
  refused_slo_rate: "Refused: delay target",
  refused_shutting_down_rate: "Refused: shutdown",
  refused_engine_unavailable_rate: "Refused: engine unavailable",
  abandoned_rate: "Patience ran out",
  cancelled_rate: "Cancelled by the client",
  failed_engine_unavailable_rate: "Failed: engine unavailable",
  failed_engine_error_rate: "Failed: engine error",
  failed_internal_error_rate: "Failed: gateway error",
  failed_shutting_down_rate: "Failed: shutdown",
  failed_deadline_exceeded_rate: "Failed: time limit",
  failed_first_token_timeout_rate: "Failed: time limit to the first token",
  failed_sequence_stalled_rate: "Failed: no token",
  failed_engine_killed_rate: "Failed: killed the engine",
};

export const CHECKS = { conservation: "Conservation", little: "Little’s law", utilisation: "Utilisation law" };

export const TARGETS = { "max-output-tokens": "Token limit", "batch-size": "Batch size", policy: "Policy", servers: "Servers" };

/** How a load balancer sends requests to servers. */
export const ROUTINGS = { random: "random", round_robin: "in turn", least_requests: "to the fewest requests" };

export const QUANTITY = { queueing_delay: "queueing delay", sojourn_time: "sojourn time" };

/** Why they disagree, in one clause. */
export function cause(reasons, assumptions) {
  const first = reasons.find((name) => name in ASSUMPTIONS || name in assumptions);
  if (!first) return "no assumption explains it";
  const says = assumptions[first]?.says ?? "";
  if (/come in bursts/.test(says)) return "arrivals come in bursts";
  if (/too regular|nearly constant/.test(says)) return "arrivals are too regular";
  return ASSUMPTIONS[first]?.[1] ?? says;
}

/** `capped:max_batch_size=8,order=x` in its parts. */
export function parsePolicy(text) {
  const [name, rest = ""] = text.split(/:(.*)/s);
  return { name, keys: Object.fromEntries(rest.split(",").filter(Boolean).map((pair) => pair.split(/=(.*)/s).slice(0, 2))) };
}

export function policyText({ name, keys }) {
  const pairs = Object.entries(keys).map(([key, value]) => `${key}=${value}`);
  return pairs.length ? `${name}:${pairs.join(",")}` : name;
}

const KEYS = { batch_size: "exactly", max_batch_size: "up to", max_wait: "waits" };

/** Its parameters for people: `up to 8`. */
export function policyDetail(text) {
  const said = Object.entries(parsePolicy(text).keys).map(([key, value]) =>
    key === "max_wait" ? `waits ${value}\u202fs at most` : key in KEYS ? `${KEYS[key]} ${value}` : `${key} ${value}`,
  );
  return said.join(", ");
}

export const policyWords = (text) => [parsePolicy(text).name, policyDetail(text)].filter(Boolean).join(" ");

export const tokenLimit = (limit) => (limit === null || limit === undefined ? "no token limit" : `token limit ${limit}`);

const patience = (seconds) => (seconds ? `patience ${seconds}\u202fs` : "no patience limit");

/** What bounds a request under the setting in force: the token limit, and the patience where one is set. */
export const limits = (setting) => [tokenLimit(setting.max_output_tokens), setting.patience ? patience(setting.patience) : ""].filter(Boolean);

/** What began this epoch, for its mark. Changes that were undone within a second leave no other trace than the epoch. */
export function changes(after, before) {
  if (!before) return [policyWords(after.policy), after.max_output_tokens ? tokenLimit(after.max_output_tokens) : "", after.patience ? patience(after.patience) : ""].filter(Boolean).join(", ");
  const said = [];
  if (after.policy !== before.policy) said.push(policyWords(after.policy));
  if (after.max_output_tokens !== before.max_output_tokens) said.push(tokenLimit(after.max_output_tokens));
  if (after.patience !== before.patience) said.push(patience(after.patience));
  if (after.calibrated) said.push("calibration");
  return said.join(", ") || "new epoch";
}

export const settingText = (setting) => [setting.policy, ...limits(setting)].join(", ");
