// Requests to the server, and their errors.

const KEY = "elias-key";

export class ApiError extends Error {
  constructor(message, status, retryAfter) {
    super(message);
    this.status = status; // 0 if there was no response
    this.retryAfter = retryAfter;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

export async function request(path, { body, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      signal,
      body: body && JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not respond.", 0);
  }
  // The request may be aborted, or the connection lost, while the body is read.
  const content = await response.json().catch((error) => {
    if (error.name === "AbortError") throw error;
    if (response.ok) throw new ApiError("The server's response is incomplete.", 0);
    return {};
  });
  if (response.ok) return content;
  const seconds = Number(response.headers.get("retry-after")) || undefined;
  throw new ApiError(content.error ?? `The server responded with status ${response.status}.`, response.status, seconds);
}
