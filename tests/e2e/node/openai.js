// The official client against the gateway. It prints what it saw as one JSON object.
// Usage: node openai.js URL KEY CALL_TOKEN ACTION
'use strict';

const { OpenAI, AuthenticationError, BadRequestError, InternalServerError } = require('openai');

const [baseURL, apiKey, callToken, action] = process.argv.slice(2);
const open = (key) => new OpenAI({ baseURL, apiKey: key, maxRetries: 0, timeout: 120_000 });
const api = open(apiKey);
const model = 'any';
const messages = [{ role: 'user', content: 'how warm is it?' }];
const greedy = { model, messages, temperature: 0, max_tokens: 12 };
const schema = {
  type: 'object', properties: { unit: { enum: ['celsius', 'kelvin'] } }, required: ['unit'],
};
const calling = {
  ...greedy,
  max_tokens: 400,
  tools: [{ type: 'function', function: { name: 'warmth', parameters: schema } }],
  tool_choice: 'required',
  logit_bias: { [callToken]: 100 },
};

// The name of the error's own class, and what it carries.
const failing = async (kind, call) => {
  try {
    await call();
  } catch (error) {
    return { is: error instanceof kind, status: error.status, type: error.type };
  }
  return { is: false };
};

const actions = {
  async chat() {
    const whole = await api.chat.completions.create(greedy);
    const stream = await api.chat.completions.create({ ...greedy, stream: true });
    let text = '';
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? '';
    return { whole: whole.choices[0].message.content, streamed: text, usage: whole.usage };
  },

  async tools() {
    const whole = await api.chat.completions.create(calling);
    // The client's own accumulator of deltas.
    const final = await api.chat.completions.stream(calling).finalChatCompletion();
    const calls = (answer) => answer.choices[0].message.tool_calls.map((call) => call.function);
    const plain = (each) => ({ name: each.name, arguments: each.arguments });
    return {
      reasons: [whole.choices[0].finish_reason, final.choices[0].finish_reason],
      whole: calls(whole).map(plain),
      streamed: calls(final).map(plain),
    };
  },

  async schema() {
    const answer = await api.chat.completions.create({
      ...greedy,
      max_tokens: 400,
      response_format: { type: 'json_schema', json_schema: { name: 'warmth', schema } },
    });
    return JSON.parse(answer.choices[0].message.content);
  },

  async logprobs() {
    const asked = { ...greedy, max_tokens: 4, logprobs: true, top_logprobs: 3 };
    return (await api.chat.completions.create(asked)).choices[0].logprobs.content;
  },

  async embeddings() {
    const input = ['a little day', 'they had so very big'];
    // By itself the client asks for base64 and decodes it.
    const decoded = await api.embeddings.create({ model, input });
    const plain = await api.embeddings.create({ model, input, encoding_format: 'float' });
    const vectors = (answer) => answer.data.map((each) => Array.from(each.embedding));
    return { decoded: vectors(decoded), plain: vectors(plain) };
  },

  async errors() {
    return {
      key: await failing(AuthenticationError, () => open('wrong').chat.completions.create(greedy)),
      field: await failing(
        BadRequestError, () => api.chat.completions.create({ ...greedy, repeat_last_n: -5 }),
      ),
      absent: await failing(InternalServerError, () => api.audio.transcriptions.create(
        { model, file: new File(['RIFF'], 'a.wav') },
      )),
    };
  },

  async cancel() {
    const asked = { ...greedy, max_tokens: undefined, ignore_eos: true, stream: true };
    const stream = await api.chat.completions.create(asked);
    let seen = 0;
    for await (const chunk of stream) {
      if (chunk.choices[0]?.delta?.content && (seen += 1) === 3) break;
    }
    return { seen, aborted: stream.controller.signal.aborted };
  },
};

actions[action]().then((seen) => console.log(JSON.stringify(seen)));
