// Show the OpenAPI file as a page, without external scripts.

import { request } from "./api.js";
import { byId, h } from "./dom.js";

const nameOf = (schema) => schema.$ref?.split("/").pop();

function typeOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return nameOf(schema);
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
  if (schema.type === "array") return `list of ${typeOf(schema.items)}`;
  return schema.type ?? "any";
}

function limitsOf(schema) {
  const inner = schema.anyOf?.find((one) => one.type !== "null") ?? schema;
  const limits = [
    ["at least", inner.minimum], ["at most", inner.maximum],
    ["at least", inner.minItems, "items"], ["at most", inner.maxItems, "items"],
    ["at most", inner.items?.maxLength ?? inner.maxLength, "characters"],
  ].filter(([, value]) => value !== undefined).map((part) => part.join(" "));
  if (schema.default !== undefined && schema.default !== null) limits.push(`default ${JSON.stringify(schema.default)}`);
  return limits.join("; ");
}

const table = (header, rows) =>
  rows.length
    ? h("table", {}, h("tr", {}, header.map((name) => h("th", { scope: "col" }, name))),
      rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell)))))
    : null;

const fields = (schema, required = []) =>
  Object.entries(schema.properties ?? {}).map(([name, field]) =>
    [h("code", {}, name), typeOf(field), limitsOf(field), field.description ?? (required.includes(name) ? "required" : "")]);

function route(path, method, operation, schemas) {
  const body = operation.requestBody?.content["application/json"]?.schema;
  const requestSchema = body && schemas[nameOf(body)];
  const example = requestSchema?.examples?.[0];
  const parameters = (operation.parameters ?? []).map((parameter) =>
    [h("code", {}, parameter.name), typeOf(parameter.schema), limitsOf(parameter.schema), parameter.description ?? ""]);
  const responses = Object.entries(operation.responses).map(([status, response]) =>
    [h("code", {}, status), response.description, typeOf(response.content?.["application/json"]?.schema)]);
  const curl = example
    ? `curl ${location.origin}${path} -H 'content-type: application/json' \\\n  -d '${JSON.stringify(example)}'`
    : `curl ${location.origin}${path}`;
  return h("article", { class: "route" },
    h("h2", {}, h("span", { class: "method" }, method.toUpperCase()), path),
    h("p", {}, operation.description),
    requestSchema || parameters.length ? h("h3", {}, "Request") : null,
    table(["name", "type", "limits", ""], requestSchema ? fields(requestSchema, requestSchema.required) : parameters),
    h("h3", {}, "Responses"),
    table(["status", "", "body"], responses),
    h("pre", { tabindex: 0 }, curl));
}

try {
  const { paths, components } = await request("openapi.json");
  const routes = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => route(path, method, operation, components.schemas)));
  byId("routes").replaceWith(h("main", { id: "routes", class: "one" }, routes));
} catch (error) {
  const message = error.status === 401 ? "This server requires an API key. Enter it on the first page." : error.message;
  byId("routes").replaceChildren(h("p", {}, message));
}
