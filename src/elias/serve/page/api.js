// Asking the server, and what can go wrong with that.

const KEY = "elias-key";

export class Failure extends Error {
  constructor(message, status, retryAfter) {
    super(message);
    this.status = status; // 0 where there was no answer at all
    this.retryAfter = retryAfter;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

export async function ask(path, { body, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      signal,
      body: body && JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server does not answer.", 0);
  }
  // may be given up, or break off, while it is read
  const told = await answer.json().catch((error) => {
    if (error.name === "AbortError") throw error;
    if (answer.ok) throw new Failure("The server's answer broke off.", 0);
    return {};
  });
  if (answer.ok) return told;
  const seconds = Number(answer.headers.get("retry-after")) || undefined;
  throw new Failure(told.error ?? `The server answered ${answer.status}.`, answer.status, seconds);
}
