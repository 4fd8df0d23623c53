// One extraction by a client generated of /openapi.json: node out/extract.js ADDRESS PICTURE_IN_BASE64

import createClient from "openapi-fetch";
import type { components, paths } from "./layertap.js";

type Feature = components["schemas"]["Feature"];
type Receipt = components["schemas"]["Receipt"];
declare const process: { argv: string[] };

const [, , baseUrl = "", image = ""] = process.argv;
const client = createClient<paths, "application/json" | "application/problem+json">({ baseUrl });

const model = await client.GET("/models/{name}", { params: { path: { name: "digits" } } });
if (model.error) throw new Error(model.error.detail);

const layers = ["block2", { layer: "pool", pool: "flatten" as const, as: "vector" }];
const reply = await client.POST("/extract", { body: { layers, inputs: [{ image }] } });
if (reply.error) throw new Error(reply.error.detail);
if (!("receipts" in reply.data)) throw new Error("this is the reply to a dry run");
const vector: Feature | undefined = reply.data.features["vector"];
const receipt: Receipt | undefined = reply.data.receipts["vector"];

const refused = await client.POST("/extract", { body: { layers: ["block9"], inputs: [{ image }] } });

// @ts-expect-error: a picture is text
await client.POST("/extract", { body: { inputs: [{ image: 5 }] } });
// @ts-expect-error: there is no such pool
await client.POST("/extract", { body: { pool: "medium", inputs: [{ image }] } });

console.log(
  JSON.stringify({
    shape: model.data.inputs?.[0]?.shape,
    data: vector?.data,
    layer: receipt?.layer,
    pooled: receipt?.pool,
    refused: refused.error?.errors?.[0]?.hint,
  }),
);
