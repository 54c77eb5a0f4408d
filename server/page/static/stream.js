// Server-sent events by fetch: an EventSource cannot send a key, and cannot tell a refusal from a gateway that is away.

const SILENCE = 6000; // milliseconds without an event: the gateway sends one every second
const FIRST_WAIT = 500;
const LONGEST_WAIT = 4000;

/** Follows `url` for ever. `on.event(name, value)`; `on.open()`; `on.lost()`; `on.refused(status, message)` resolves when to try again. */
export async function follow(url, headers, on) {
  for (let wait = FIRST_WAIT; ; wait = Math.min(1.6 * wait, LONGEST_WAIT)) {
    const abort = new AbortController();
    try {
      const answer = await fetch(url, { headers: { accept: "text/event-stream", ...headers() }, cache: "no-store", signal: abort.signal });
      if (answer.status === 401 || answer.status === 403) {
        await on.refused(answer.status, await reason(answer));
        continue;
      }
      if (answer.ok) {
        on.open();
        wait = FIRST_WAIT;
        await read(answer.body.getReader(), abort, on.event);
      }
    } catch (error) {
      if (!(error instanceof TypeError) && error.name !== "AbortError") console.error(error); // those two: the gateway is away
    }
    on.lost();
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

async function read(reader, abort, onEvent) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const timer = setTimeout(() => abort.abort(), SILENCE);
    const { done, value } = await reader.read();
    clearTimeout(timer);
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) parse(event, onEvent);
  }
}

function parse(event, onEvent) {
  let name = "message";
  let data = "";
  for (const line of event.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (data) onEvent(name, JSON.parse(data));
}

/** The sentence of an error in OpenAI's shape. */
export async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the gateway answered ${answer.status}`;
  }
}
