// The official client for Node against a live server: URL MODEL as arguments. Ends with 0 where everything holds.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 }, warm: { type: "boolean" } },
  required: ["city", "warm"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", description: "The weather of a city.", parameters: schema } }];

const checks = {
  async models() {
    const names = [];
    for await (const one of client.models.list()) names.push(one.id);
    assert.ok(names.includes(model));
  },
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 12, temperature: 0 });
    assert.ok(answer.choices[0].message.content);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  },
  async stream() {
    const how = { model, messages, max_tokens: 12, temperature: 0 };
    const whole = await client.chat.completions.create(how);
    let text = "";
    let usage = null;
    for await (const part of await client.chat.completions.create({ ...how, stream: true, stream_options: { include_usage: true } })) {
      text += part.choices[0]?.delta?.content ?? "";
      usage = part.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },
  async tools() {
    const how = { model, messages, tools, tool_choice: "required", max_tokens: 200, temperature: 0 };
    const answer = await client.chat.completions.create(how);
    const call = answer.choices[0].message.tool_calls[0];
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    assert.equal(call.function.name, "weather");
    assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)).sort(), ["city", "warm"]);
    let fragments = "";
    for await (const part of await client.chat.completions.create({ ...how, stream: true })) {
      fragments += part.choices[0]?.delta?.tool_calls?.[0]?.function?.arguments ?? "";
    }
    assert.equal(fragments, call.function.arguments);
    const result = { role: "tool", tool_call_id: call.id, content: "sunny" };
    const then = await client.chat.completions.create({ model, messages: [...messages, answer.choices[0].message, result], tools, max_tokens: 8 });
    assert.ok(then.choices[0].message);
  },
  async schema() {
    const response_format = { type: "json_schema", json_schema: { name: "weather", schema, strict: true } };
    const answer = await client.chat.completions.create({ model, messages, response_format, max_tokens: 200 });
    assert.equal(typeof JSON.parse(answer.choices[0].message.content).warm, "boolean");
  },
  async embeddings() {
    const base64 = await client.embeddings.create({ model, input: ["one", "two"] });
    const floats = await client.embeddings.create({ model, input: ["one", "two"], encoding_format: "float" });
    assert.deepEqual(base64.data.map((one) => one.embedding.length), floats.data.map((one) => one.embedding.length));
    assert.ok(Math.abs(base64.data[1].embedding[0] - floats.data[1].embedding[0]) < 1e-6);
  },
  async logprobs() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 4, logprobs: true, top_logprobs: 2 });
    assert.equal(answer.choices[0].logprobs.content[0].top_logprobs.length, 2);
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), OpenAI.NotFoundError);
    await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), OpenAI.BadRequestError);
  },
  async leaving() {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 400, stream: true });
    for await (const part of stream) if (part) break;
    assert.ok((await client.chat.completions.create({ model, messages, max_tokens: 2 })).choices[0]);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`openai for Node, ${name}: held`);
}
