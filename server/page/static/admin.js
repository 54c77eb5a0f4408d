// The operator's calls: with the admin key where the gateway asks for one. It stays in this tab's session and goes nowhere else.

import { byId, say } from "./dom.js";
import { reason } from "./stream.js";

export const AWAY = "the gateway does not answer";
const NAME = "kendall-admin-key";
const PLAIN = /^[!-~]+$/; // what a key of the gateway consists of; a header takes nothing above 255
const AROUND = /^[\s\p{Cf}]+|[\s\p{Cf}]+$/gu; // spaces and characters without a width, as copying brings them along

function stored() {
  const key = sessionStorage.getItem(NAME);
  return key !== null && PLAIN.test(key) ? key : null;
}

export const headers = () => (stored() ? { authorization: `Bearer ${stored()}` } : {});

/** Why this cannot be a key of the gateway; empty where it can. */
function faultOf(key) {
  if (!key) return "Got an empty key; expected printable ASCII characters. Enter the key again.";
  const place = [...key].findIndex((each) => !PLAIN.test(each));
  if (place < 0) return "";
  const odd = [...key][place];
  const code = `U+${odd.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  const seen = /[\p{L}\p{N}\p{P}\p{S}]/u.test(odd) ? `“${odd}” (${code})` : code;
  return `Got ${seen} as character ${place + 1} of the key; expected printable ASCII characters without spaces. Enter the key again.`;
}

function remember(key) {
  if (key) sessionStorage.setItem(NAME, key);
  else sessionStorage.removeItem(NAME);
  byId("forget").hidden = !key;
}

const keyOf = (input) => input.value.replace(AROUND, "");

/** A key that cannot be sent keeps the dialog open and says why. */
function check(event) {
  if (event.submitter?.value === "cancel") return;
  const input = byId("key-value");
  const fault = faultOf(keyOf(input));
  if (!fault) return;
  event.preventDefault();
  say(byId("key-why"), fault);
  input.setAttribute("aria-invalid", "true");
  input.select();
}

/** Asks for the key; null where the operator would rather not. */
export function askForKey(why) {
  const dialog = byId("key");
  const input = byId("key-value");
  say(byId("key-why"), why);
  input.removeAttribute("aria-invalid");
  input.value = "";
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const key = dialog.returnValue === "ok" ? keyOf(input) : null;
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
  byId("key").querySelector("form").addEventListener("submit", check);
  byId("forget").addEventListener("click", () => {
    remember(null);
    location.reload(); // the stream was opened with the key
  });
}
