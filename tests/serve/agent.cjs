// An agent with OpenAI's client for Node: `node agent.cjs URL MODEL KEY`; a wrong answer ends it with an error.
const assert = require("node:assert");
const { OpenAI } = require("openai");

const [url, model, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, timeout: 600000, maxRetries: 0 });
const common = { model, max_tokens: 40, temperature: 0 };
const places = { enum: ["Bern", "Rome"] };

function tool(name, field) {
  const parameters = { type: "object", properties: { [field]: places }, required: [field], additionalProperties: false };
  return { name, description: name, parameters };
}

async function main() {
  const functions = [tool("weather", "city"), tool("calendar", "place")];
  const tools = functions.map((each) => ({ type: "function", function: each }));
  const messages = [{ role: "user", content: "Rain?" }];

  const whole = await client.chat.completions.create({ ...common, messages });
  let text = "";
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const part of await client.chat.completions.create({ ...common, messages, ...options })) {
    text += part.choices[0]?.delta?.content ?? "";
  }
  assert.strictEqual(text, whole.choices[0].message.content);

  const schema = { type: "object", properties: { city: places }, required: ["city"], additionalProperties: false };
  const form = { type: "json_schema", json_schema: { name: "Weather", strict: true, schema } };
  const parsed = await client.chat.completions.parse({ ...common, messages, response_format: form });
  assert.ok(places.enum.includes(JSON.parse(parsed.choices[0].message.content).city));

  for (const choice of ["required", { type: "function", function: { name: "calendar" } }, "auto"]) {
    const ask = { ...common, messages, tools, tool_choice: choice, parallel_tool_calls: false };
    const message = (await client.chat.completions.create(ask)).choices[0].message;
    const streamed = (await client.chat.completions.stream(ask).finalChatCompletion()).choices[0].message;
    const calls = message.tool_calls ?? [];
    const asText = (found) => (found ?? []).map((call) => [call.function.name, call.function.arguments]);
    assert.deepStrictEqual(asText(streamed.tool_calls), asText(calls));
    assert.ok(choice === "auto" || calls.length === 1);
    if (typeof choice === "object") assert.strictEqual(calls[0].function.name, "calendar");
    messages.push(message);
    for (const call of calls) messages.push({ role: "tool", tool_call_id: call.id, content: "Sun" });
  }

  const asked = { model, input: "Rain?", max_output_tokens: 40, temperature: 0 };
  assert.ok((await client.responses.create(asked)).output_text);
  const flat = functions.map((each) => ({ type: "function", strict: true, ...each }));
  let done = null;
  for await (const event of await client.responses.create({ ...asked, stream: true, tools: flat, tool_choice: "required" })) {
    if (event.type === "response.completed") done = event.response;
  }
  assert.ok(done.output.some((item) => item.type === "function_call"));
  await assert.rejects(client.chat.completions.create({ ...common, messages, model: "other" }), OpenAI.NotFoundError);
}

main();
