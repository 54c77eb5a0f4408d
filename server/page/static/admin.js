// The operator's calls: with the admin key where the gateway asks for one. It stays in this tab's session and goes nowhere else.

import { byId, say } from "./dom.js";
import { reason } from "./stream.js";

export const AWAY = "the gateway does not answer";
const NAME = "kendall-admin-key";
const stored = () => sessionStorage.getItem(NAME);

export const headers = () => (stored() ? { authorization: `Bearer ${stored()}` } : {});

function remember(key) {
  if (key) sessionStorage.setItem(NAME, key);
  else sessionStorage.removeItem(NAME);
  byId("forget").hidden = !key;
}

/** Asks for the key; null where the operator would rather not. */
export function askForKey(why) {
  const dialog = byId("key");
  const input = byId("key-value");
  say(byId("key-why"), why);
  input.value = "";
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const key = dialog.returnValue === "ok" ? input.value.trim() : null;
      input.value = "";
      if (key) remember(key);
      resolve(key);
    }, { once: true });
  });
}

/** The answer's JSON. A refusal asks for the key and tries again, once; throws an Error with the gateway's own sentence. */
export async function call(method, path, body = null, again = true) {
  let answer;
  try {
    const content = body === null ? {} : { body: JSON.stringify(body) };
    answer = await fetch(path, { method, headers: { "content-type": "application/json", ...headers() }, cache: "no-store", ...content });
  } catch {
    throw new Error(AWAY);
  }
  if (answer.ok) return answer.json();
  const why = await reason(answer);
  if ((answer.status === 401 || answer.status === 403) && again) {
    remember(null);
    if (await askForKey(why)) return call(method, path, body, false);
  }
  throw new Error(why);
}

export function watchKey() {
  byId("forget").hidden = !stored();
  byId("forget").addEventListener("click", () => {
    remember(null);
    location.reload(); // the stream was opened with the key
  });
}
