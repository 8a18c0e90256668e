{{/* Names */}}
{{- define "yardstick.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "yardstick.fullname" -}}
{{- $name := include "yardstick.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- include "yardstick.shortened" (list (.Values.fullnameOverride | default $full) 40) -}}
{{- end }}

{{/* A name of at most so many characters. The end of a longer one is a digest of it, so that no two are shortened to the same:
     (list NAME CHARACTERS) */}}
{{- define "yardstick.shortened" -}}
{{- $name := index . 0 -}}
{{- $most := index . 1 -}}
{{- if gt (len $name) $most }}{{ printf "%s-%s" ($name | trunc (int (sub $most 9)) | trimSuffix "-") ($name | sha256sum | trunc 8) }}{{ else }}{{ $name }}{{ end -}}
{{- end }}

{{/* Labels: (dict "root" $ "component" "engine") */}}
{{- define "yardstick.selector" -}}
app.kubernetes.io/name: {{ include "yardstick.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Labels of an object: (dict "root" $ "component" "engine" "own" MAP). A key has one value: the chart's, then `own`, then commonLabels */}}
{{- define "yardstick.labels" -}}
{{- $labels := include "yardstick.selector" . | fromYaml -}}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-") -}}
{{- $_ := set $labels "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $labels "app.kubernetes.io/part-of" "yardstick" -}}
{{- $_ := set $labels "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- merge $labels (.own | default dict) .root.Values.commonLabels | toYaml -}}
{{- end }}

{{/* Labels of pods: (dict "root" $ "selector" TEXT "own" MAP). None changes with the chart's version, because that would restart every pod */}}
{{- define "yardstick.podLabels" -}}
{{- $labels := .selector | fromYaml -}}
{{- $_ := set $labels "app.kubernetes.io/part-of" "yardstick" -}}
{{- merge $labels (.own | default dict) .root.Values.commonLabels | toYaml -}}
{{- end }}

{{/* "true" if the cluster has at least version .is; fields that are newer than the chart's minimum need this check */}}
{{- define "yardstick.atLeast" -}}
{{- $version := .root.Values.kubeVersionOverride | default .root.Capabilities.KubeVersion.Version -}}
{{- if semverCompare (printf ">=%s-0" .is) $version }}true{{ end -}}
{{- end }}

{{/* The pools as a YAML map from name to the values of `engine`, overridden by the pool's own; "default" is `engine` itself */}}
{{- define "yardstick.pools" -}}
{{- $pools := dict -}}
{{- if .Values.engine.enabled }}{{ $_ := set $pools "default" .Values.engine }}{{ end -}}
{{- range $name, $own := .Values.pools -}}
{{- if or $own.enabled (not (hasKey $own "enabled")) -}}
{{- $_ := set $pools $name (include "yardstick.overridden" (dict "base" $.Values.engine "own" $own) | fromYaml) -}}
{{- end -}}
{{- end -}}
{{- range $name, $engine := $pools }}{{ include "yardstick.checkPool" (dict "pool" $name "engine" $engine) }}{{ end -}}
{{- toYaml $pools -}}
{{- end }}

{{/* `base` with the values of `own`. Groups of values are merged; lists, labels, selectors, adapters and quantities are replaced as a
     whole, so that an empty one removes what was inherited. What belongs to the model of `base` does not go with another model */}}
{{- define "yardstick.overridden" -}}
{{- $result := deepCopy .base -}}
{{- if and (hasKey .own "model") (ne .own.model .base.model) -}}
{{- range list "revision" "lenvmModel" "lenvmRevision" "servedName" }}{{ $_ := set $result . "" }}{{ end -}}
{{- range list "existingClaim" "directory" "root" }}{{ $_ := set $result.lora . "" }}{{ end -}}
{{- $_ := set $result.lora "adapters" dict -}}
{{- end -}}
{{- range $key, $value := .own -}}
{{- if has $key (list "lora" "modelCache" "hubToken" "serviceAccount" "resources" "autoscaling" "podDisruptionBudget" "updateStrategy") -}}
{{- range $inner, $part := $value }}{{ $_ := set (get $result $key) $inner $part }}{{ end -}}
{{- else -}}
{{- $_ := set $result $key $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $result -}}
{{- end }}

{{/* Name of a pool's StatefulSet and Service. The names of its pods' revisions are 11 characters longer, and a label holds 63 */}}
{{- define "yardstick.poolName" -}}
{{- $name := printf "%s-engine%s" (include "yardstick.fullname" .root) (ternary "" (printf "-%s" .pool) (eq .pool "default")) -}}
{{- include "yardstick.shortened" (list $name 52) -}}
{{- end }}

{{/* Name of a pool's model for clients */}}
{{- define "yardstick.servedName" -}}
{{ .servedName | default (ternary (base .model) "yardstick-demo" (ne .model "")) }}
{{- end }}

{{/* Number of GPUs of a pool's pods */}}
{{- define "yardstick.gpus" -}}
{{- $count := 0 -}}
{{- range $name, $number := .resources.limits -}}
{{- if regexMatch "^nvidia\\.com/(gpu|gpu\\.shared|mig-.+)$" $name }}{{ $count = add $count (int $number) }}{{ end -}}
{{- end -}}
{{ $count }}
{{- end }}

{{/* Device of a pool: its own, or the one that its resources name; empty where neither does */}}
{{- define "yardstick.device" -}}
{{ .device | default (ternary "cuda" "" (gt (include "yardstick.gpus" . | int) 0)) }}
{{- end }}

{{- define "yardstick.engineImage" -}}
{{- $variant := .engine.variant | default (ternary "cuda" "cpu" (eq (include "yardstick.device" .engine) "cuda")) -}}
{{- include "yardstick.image" (dict "root" .root "values" .engine "part" (printf "engine-%s" $variant) "suffix" (ternary "" "-cuda" (eq $variant "cpu"))) -}}
{{- end }}

{{- define "yardstick.gatewayImage" -}}
{{- include "yardstick.image" (dict "root" . "values" .Values.gateway "part" "gateway" "suffix" "") -}}
{{- end }}

{{/* Image of a part. The release's digest holds for the release's tag only: (dict "root" $ "values" VALUES "part" KEY "suffix" TEXT) */}}
{{- define "yardstick.image" -}}
{{- $image := .root.Values.image -}}
{{- $tag := .values.tag | default (printf "%s%s" ($image.tag | default .root.Chart.AppVersion) .suffix) -}}
{{- $released := ternary "" (get ($image.digests | default dict) .part) (ne (print .values.tag $image.tag) "") -}}
{{ $image.registry }}/{{ .values.repository }}:{{ $tag }}{{ with .values.digest | default $released }}@{{ . }}{{ end }}
{{- end }}

{{/* Resources of a pool's engines. The demo model on a CPU has a memory limit */}}
{{- define "yardstick.engineResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if and (not .model) (ne (include "yardstick.device" .) "cuda") (not (hasKey ($resources.limits | default dict) "memory")) -}}
{{- $_ := set $resources "limits" (set ($resources.limits | default dict) "memory" "2Gi") -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{- define "yardstick.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Entries by which gateways find engines */}}
{{- define "yardstick.engines" -}}
{{- $sources := .Values.gateway.engines -}}
{{- if not $sources -}}
{{- range $pool, $_ := include "yardstick.pools" . | fromYaml -}}
{{- $sources = append $sources (printf "%s://%s:8100" $.Values.gateway.discovery (include "yardstick.poolName" (dict "root" $ "pool" $pool))) -}}
{{- end -}}
{{- end -}}
{{- if not $sources }}{{ fail "there is no engine: enable `engine`, add a pool, or set `gateway.engines`" }}{{ end -}}
{{- join "," $sources -}}
{{- end }}

{{/* "true" if gateways use the Kubernetes API */}}
{{- define "yardstick.asksAPI" -}}
{{- if or .Values.auth.watch (contains "kubernetes://" (include "yardstick.engines" .)) }}true{{ end -}}
{{- end }}

{{- define "yardstick.serviceAccount" -}}
{{ .Values.gateway.serviceAccount.name | default (include "yardstick.fullname" .) }}
{{- end }}

{{/* Number of pods of an object and the annotations about it, as YAML: (dict "root" $ "kind" KIND "name" NAME "replicas" N "autoscaling"
     VALUES). The object's own number counts while an autoscaler is on, or while the value is the one of the last upgrade, which
     `yardstick/replicas` keeps: so `kubectl scale` and the end of autoscaling last, and a changed value counts. An autoscaled object that
     never had a number in its manifest (`yardstick/autoscaled`) has none, so that rollbacks change nothing either; one that had a number
     keeps it there, because Helm would set it to 1 if it were removed */}}
{{- define "yardstick.scaling" -}}
{{- $known := dict -}}
{{- if not .root.Values.gitops }}{{ $known = lookup "apps/v1" .kind .root.Release.Namespace .name }}{{ end -}}
{{- $notes := ($known.metadata | default dict).annotations | default dict -}}
{{- $keeps := or .autoscaling.enabled (eq (get $notes "yardstick/replicas") (toString .replicas)) -}}
{{- $free := and .autoscaling.enabled (or (not $known) (hasKey $notes "yardstick/autoscaled")) -}}
annotations:
  yardstick/replicas: {{ toString .replicas | quote }}
  {{- if $free }}
  yardstick/autoscaled: "true"
  {{- else }}
replicas: {{ if and $known $keeps }}{{ $known.spec.replicas }}{{ else }}{{ .replicas }}{{ end }}
  {{- end }}
{{- end }}

{{/* Names of the Secrets */}}
{{- define "yardstick.tokenSecret" -}}
{{ .Values.engineToken.existingSecret | default (printf "%s-engine-token" (include "yardstick.fullname" .)) }}
{{- end }}

{{- define "yardstick.keysSecret" -}}
{{ .Values.auth.existingSecret | default (printf "%s-api-keys" (include "yardstick.fullname" .)) }}
{{- end }}

{{- define "yardstick.firstKeySecret" -}}
{{ include "yardstick.fullname" . }}-first-key
{{- end }}

{{/* "true" if the chart generates a first key */}}
{{- define "yardstick.makesKey" -}}
{{- if and .Values.auth.generateFirstKey (not .Values.auth.existingSecret) }}true{{ end -}}
{{- end }}

{{/* A generated value, the same for the whole release and over upgrades: (dict "root" $ "secret" NAME "key" KEY) */}}
{{- define "yardstick.generated" -}}
{{- if .root.Values.gitops -}}
{{- fail (printf "with `gitops` the chart generates no Secret, and %s would be one: set `engineToken.existingSecret`, `auth.existingSecret` (or `auth.keys`, and `auth.generateFirstKey` to false), and `redis.existingSecret` (or `redis.enabled` to false)" .secret) -}}
{{- end -}}
{{- if not (hasKey .root.Values "drawn") }}{{ $_ := set .root.Values "drawn" dict }}{{ end -}}
{{- if not (hasKey .root.Values.drawn .secret) -}}
{{- $known := get ((lookup "v1" "Secret" .root.Release.Namespace .secret).data | default dict) .key -}}
{{- $_ := set .root.Values.drawn .secret (ternary ($known | b64dec) (randAlphaNum 40) (ne $known "")) -}}
{{- end -}}
{{- get .root.Values.drawn .secret -}}
{{- end }}

{{/* Redis: "true" if the chart starts one; its name; the Secret of the password, or nothing, and the key in it */}}
{{- define "yardstick.bundlesRedis" -}}
{{- if and .Values.redis.enabled (not .Values.redis.url) }}true{{ end -}}
{{- end }}

{{- define "yardstick.redisName" -}}
{{ include "yardstick.fullname" . }}-redis
{{- end }}

{{- define "yardstick.redisSecret" -}}
{{ .Values.redis.existingSecret | default (ternary (include "yardstick.redisName" .) "" (eq (include "yardstick.bundlesRedis" .) "true")) }}
{{- end }}

{{- define "yardstick.redisSecretKey" -}}
{{ ternary .Values.redis.existingSecretKey "password" (ne .Values.redis.existingSecret "") }}
{{- end }}

{{/* Headers for the collector of traces, as an environment variable */}}
{{- define "yardstick.tracingHeaders" -}}
{{- if and .Values.tracing.endpoint .Values.tracing.headersSecret -}}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom:
    secretKeyRef:
      name: {{ .Values.tracing.headersSecret }}
      key: {{ .Values.tracing.headersSecretKey }}
{{- end }}
{{- end }}

{{/* Security context of every container */}}
{{- define "yardstick.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Scheduling of pods, which are spread if there is a selector: (dict "root" $ "values" .Values.gateway "selector" SELECTOR) */}}
{{- define "yardstick.placement" -}}
{{- $text := include "yardstick.placementLines" . | trim -}}
{{ $text }}
{{- end }}

{{- define "yardstick.placementLines" -}}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- if and .selector .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range .values.topologySpreadConstraints }}
  - {{- omit . "labelSelector" | toYaml | nindent 4 }}
    labelSelector:
      {{- .labelSelector | default (dict "matchLabels" ($.selector | fromYaml)) | toYaml | nindent 6 }}
  {{- end }}
{{- else if and .selector .values.spread }}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- $.selector | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Name of a pool's ServiceAccount; empty: the namespace's default: (dict "name" NAME-OF-THE-POOL "engine" VALUES) */}}
{{- define "yardstick.engineAccount" -}}
{{ .engine.serviceAccount.name | default (ternary .name "" .engine.serviceAccount.create) }}
{{- end }}
