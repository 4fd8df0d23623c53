// The server's public API: sends requests with the tab's key, turns problems into text, decodes base64 arrays.

const KEY = "layertap-key";

export class ProblemError extends Error {
  // The fields of an application/problem+json reply; status 0 without a reply.
  constructor(status, detail, hint, seconds) {
    super(detail);
    this.status = status;
    this.hint = hint;
    this.seconds = seconds;
  }
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

export async function ask(path, body, signal) {
  const headers = { accept: "application/json" };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  const request = { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal };
  return send(path, request, (reply) => reply.json());
}

export function load(path) {
  // Fetch a file of the page itself.
  return send(path, {}, (reply) => reply.blob());
}

async function send(path, request, read) {
  let reply;
  try {
    reply = await fetch(path, request);
    if (reply.ok) return await read(reply);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ProblemError(0, "The server does not answer.", "It may have ended, or the way to it is broken.");
  }
  throw await readProblem(reply);
}

async function readProblem(reply) {
  const seconds = Number(reply.headers.get("retry-after")) || 0;
  try {
    const problem = await reply.json();
    const faults = [problem, ...(problem.errors || [])]; // the first fault may be the problem itself
    const join = (field) => [...new Set(faults.map((each) => each[field]).filter(Boolean))].join("; ");
    return new ProblemError(reply.status, join("detail"), join("hint"), seconds);
  } catch {
    return new ProblemError(reply.status, `The server answered with status ${reply.status}.`, "", seconds);
  }
}

export function decode(feature) {
  // Decode a result of `encoding: "base64"`: its shape, and its values in C order.
  const text = atob(feature.data);
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
  const kinds = { float32: Float32Array, float64: Float64Array, int64: BigInt64Array, int32: Int32Array, uint8: Uint8Array, bool: Uint8Array };
  const values = new (kinds[feature.dtype] || Float32Array)(bytes.buffer);
  return { shape: feature.shape, values: values instanceof Float32Array ? values : Float32Array.from(values, Number) };
}

export function encode(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 32768) text += String.fromCharCode(...bytes.subarray(at, at + 32768));
  return btoa(text);
}
