{{/* Models and hub adapters of a pool that may have to be downloaded, as arguments of `python -m yardstick_llm.engine.models.download` */}}
{{- define "yardstick.models" -}}
{{- if .model }}
- {{ printf "%s%s" .model (ternary "" (printf "@%s" .revision) (eq .revision "")) | quote }}
{{- end }}
{{- if .lenvmModel }}
- {{ printf "%s%s" .lenvmModel (ternary "" (printf "@%s" .lenvmRevision) (eq .lenvmRevision "")) | quote }}
{{- end }}
{{- range $name, $path := .lora.adapters }}
{{- if regexMatch "^[\\w-][\\w.-]*/[\\w-][\\w.-]*(@.+)?$" $path }}
- {{ printf "--lora=%s=%s" $name $path | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Places of models and caches, as environment variables */}}
{{- define "yardstick.cacheEnv" -}}
- {name: HF_HOME, value: /cache/huggingface}
- {name: HF_HUB_CACHE, value: /models/huggingface/hub}
{{- end }}

{{/* The hub's token, as an environment variable, from the values of a pool */}}
{{- define "yardstick.hubToken" -}}
{{- with .hubToken.secret -}}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.hubToken.key }}
{{- end }}
{{- end }}

{{/* Container that downloads the models of a pool, or waits for a Job that does: (dict "root" $ "engine" VALUES "waits" BOOL) */}}
{{- define "yardstick.downloadContainer" -}}
name: download
image: {{ include "yardstick.engineImage" (dict "root" .root "engine" .engine) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: [python, -m, yardstick_llm.engine.models.download]
args:
  {{- if .waits }}
  - --wait={{ .engine.startupSeconds }}
  {{- end }}
  {{- include "yardstick.models" .engine | trim | nindent 2 }}
env:
  {{- include "yardstick.cacheEnv" . | nindent 2 }}
  {{- if not .waits }}
  {{- with include "yardstick.hubToken" .engine }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- end }}
  {{- with .engine.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
resources:
  {{- toYaml .engine.modelCache.downloadResources | nindent 2 }}
securityContext:
  {{- include "yardstick.containerSecurity" .root | nindent 2 }}
volumeMounts:
  - {name: models, mountPath: /models{{ if .waits }}, readOnly: true{{ end }}}
  - {name: cache, mountPath: /cache}
  - {name: tmp, mountPath: /tmp}
  {{- with .engine.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Pod of the Job that downloads the models of a pool, placed as the pool's pods are: (dict "root" $ "engine" VALUES "name" NAME-OF-THE-POOL
     "component" LABELS) */}}
{{- define "yardstick.downloadPod" -}}
metadata:
  labels:
    {{- include "yardstick.podLabels" (dict "root" .root "selector" (include "yardstick.selector" .component) "own" .engine.podLabels) | nindent 4 }}
spec:
  restartPolicy: OnFailure
  {{- with include "yardstick.pullSecrets" .root }}{{ . | nindent 2 }}{{ end }}
  {{- with include "yardstick.engineAccount" (dict "name" .name "engine" .engine) }}
  serviceAccountName: {{ . }}
  {{- end }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    {{- toYaml .root.Values.podSecurityContext | nindent 4 }}
  {{- with include "yardstick.placement" (dict "values" .engine) }}{{ . | nindent 2 }}{{ end }}
  containers:
    - {{ include "yardstick.downloadContainer" (dict "root" .root "engine" .engine "waits" false) | nindent 6 | trim }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: cache
      emptyDir: {}
    - name: models
      persistentVolumeClaim:
        claimName: {{ .engine.modelCache.existingClaim }}
    {{- with .engine.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
