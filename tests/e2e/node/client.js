// A client without generated code. It prints what it saw as one JSON object.
// Usage: node client.js PROTO_DIR ADDRESS KEY generate|tokenize|refused|cancel
'use strict';

const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');
const protobuf = require('protobufjs');

const [protoDir, address, key, action] = process.argv.slice(2);
const files = ['generation', 'tokenization', 'slot'].map((name) => `kvarts/v1/${name}.proto`);
const options = {
  includeDirs: [protoDir], longs: Number, enums: String, oneofs: true, defaults: true,
};
const { kvarts } = grpc.loadPackageDefinition(loader.loadSync(files, options));

const open = (Service) => new Service(address, grpc.credentials.createInsecure());
const generation = open(kvarts.v1.GenerationService);
const tokenization = open(kvarts.v1.TokenizationService);
const slots = open(kvarts.v1.SlotService);

const metadata = new grpc.Metadata();
metadata.set('authorization', `Bearer ${key}`);

const unary = (service, method, request) => new Promise((resolve, reject) => {
  service[method](request, metadata, (error, reply) => (error ? reject(error) : resolve(reply)));
});

// Collects the events of a stream, and the error that ended it if one did.
const stream = (request, onEvent = () => {}) => new Promise((resolve) => {
  const events = [];
  const call = generation.Generate(request, metadata);
  call.on('data', (event) => { events.push(event); onEvent(event, call); });
  call.on('error', (error) => resolve({ events, error }));
  call.on('end', () => resolve({ events }));
});

// google/rpc/status.proto and error_details.proto, as far as they are read here.
const rpc = protobuf.parse(`
  syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
`).root;

const errorInfo = (error) => {
  const [trailer] = error.metadata.get('grpc-status-details-bin');
  const { details } = rpc.lookupType('Status').decode(trailer);
  const info = details.find((detail) => detail.typeUrl.endsWith('/google.rpc.ErrorInfo'));
  return rpc.lookupType('ErrorInfo').decode(info.value).toJSON();
};

const untilIdle = async (deadline) => {
  for (;;) {
    const { slots: listed } = await unary(slots, 'ListSlots', {});
    const states = listed.map((slot) => slot.state);
    if (states.every((state) => state === 'SLOT_STATE_IDLE')) return states;
    if (Date.now() > deadline) throw new Error(`still busy: ${states}`);
    await new Promise((resolve) => { setTimeout(resolve, 20); });
  }
};

const actions = {
  generate: async () => {
    const request = { text: 'the day', maxTokens: 5, sampling: { temperature: 0 } };
    const { events, error } = await stream(request);
    if (error) throw error;
    return events;
  },
  tokenize: async () => {
    const { tokens } = await unary(tokenization, 'Tokenize', { text: 'the day' });
    return tokens.map(({ id, piece }) => ({ id, piece: piece.toString() }));
  },
  refused: async () => {
    const { events, error } = await stream({ text: 'the', slotId: 4000 });
    return { events, code: grpc.status[error.code], info: errorInfo(error) };
  },
  cancel: async () => {
    const request = { text: 'the day', ignoreEos: true, sampling: { temperature: 0 } };
    const { events, error } = await stream(request, (event, call) => {
      if (event.chunk) call.cancel();
    });
    const states = await untilIdle(Date.now() + 60000);
    return { kinds: events.map((event) => event.event), code: grpc.status[error.code], states };
  },
};

actions[action]().then((seen) => console.log(JSON.stringify(seen)));
