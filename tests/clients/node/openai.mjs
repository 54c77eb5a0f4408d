// OpenAI's client for Node as its users call it: the same calls and the same JSON as ../libraries.py.
import OpenAI from "openai";

const { url, keys, bias } = JSON.parse(process.argv[2]);
const messages = [{ role: "user", content: "What about the weather?" }];
const parameters = {
  type: "object",
  properties: {
    city: { type: "string", enum: ["Paris", "Rome"] },
    days: { type: "integer", enum: [1, 2, 3, 4, 5, 6, 7] },
  },
  required: ["city", "days"],
};
const sampling = { max_tokens: 8, temperature: 0 };

function create(kind, { retries = false, ...body } = {}) {
  const client = new OpenAI({
    baseURL: `${url}/v1`,
    apiKey: keys[kind],
    ...(retries ? {} : { maxRetries: 0 }),
  });
  return client.chat.completions.create({ model: "tiny", messages, ...body });
}

async function plain(kind, changed) {
  const answer = await create(kind, { ...sampling, ...changed });
  return answer.choices[0].message.content;
}

async function stream() {
  const texts = [];
  for await (const chunk of await create("stream", { stream: true, ...sampling }))
    for (const choice of chunk.choices) if (choice.delta.content) texts.push(choice.delta.content);
  return texts;
}

async function tools() {
  const answer = await create("tools", {
    max_tokens: 200,
    logit_bias: bias,
    tools: [{ type: "function", function: { name: "weather", parameters } }],
    tool_choice: "required",
  });
  return answer.choices[0].message.tool_calls.map((call) => JSON.parse(call.function.arguments));
}

async function attempt(call) {
  try {
    return { answer: await call() };
  } catch (error) {
    const name = Object.keys(OpenAI).find((key) => OpenAI[key] === error.constructor);
    return { error: `openai.${name}`, status: error.status ?? null, text: String(error) };
  }
}

console.log(
  JSON.stringify({
    plain: await attempt(() => plain("plain")),
    stream: await attempt(stream),
    tools: await attempt(tools),
    400: await attempt(() => plain("400", { temperature: -1 })),
    401: await attempt(() => plain("401")),
    404: await attempt(() => plain("404", { model: "missing" })),
    first: await attempt(() => plain("limited")),
    429: await attempt(() => plain("limited")),
    retries: await attempt(() => plain("limited", { retries: true })),
  }),
);
