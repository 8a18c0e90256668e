// Validates the manifests in the JSON file argv[2] with the classes of @kubernetes-models: values by their schemas, and by TypeScript's
// types also that no field is unknown. Prints a JSON list of errors.
import { readFileSync } from "node:fs";
import ts from "typescript";

const MODULES = {
  HTTPRoute: "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1/HTTPRoute",
  ScaledObject: "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject",
  PodMonitor: "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor",
  PrometheusRule: "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PrometheusRule",
  ServiceMonitor: "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/ServiceMonitor",
};
const manifests = JSON.parse(readFileSync(process.argv[2], "utf8"));
const errors = [];
const lines = [];
for (const [place, manifest] of manifests.entries()) {
  const { kind, metadata } = manifest;
  const found = await import(MODULES[kind]);
  try {
    new found[kind](manifest).validate();
  } catch (error) {
    errors.push(`${kind} ${metadata.name}: ${error.message}`);
  }
  lines.push(`import { I${kind} as Kind${place} } from "${MODULES[kind]}";`);
  lines.push(`export const manifest${place}: Kind${place} = ${JSON.stringify(manifest)};`);
}
const source = "manifests.ts";
const options = { noEmit: true, strict: true, skipLibCheck: true, types: [], moduleResolution: ts.ModuleResolutionKind.Node10 };
const host = ts.createCompilerHost(options);
const { getSourceFile, fileExists, readFile } = host;
host.fileExists = (name) => name === source || fileExists(name);
host.readFile = (name) => (name === source ? lines.join("\n") : readFile(name));
host.getSourceFile = (name, ...rest) =>
  name === source ? ts.createSourceFile(name, lines.join("\n"), ts.ScriptTarget.Latest) : getSourceFile(name, ...rest);
for (const found of ts.getPreEmitDiagnostics(ts.createProgram([source], options, host))) {
  errors.push(ts.flattenDiagnosticMessageText(found.messageText, " "));
}
console.log(JSON.stringify(errors));
