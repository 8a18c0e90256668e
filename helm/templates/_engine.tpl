{{/* Pods of engines. Those of a group (docs/operations.md) share one model: (dict "root" $ "name" NAME-OF-THE-POOL "engine" VALUES
     "selector" SELECTOR "rank" RANK), where RANK is the number of a node in its group or, in a LeaderWorkerSet, `worker` for all but 0 */}}
{{- define "yardstick.enginePod" -}}
{{- $engine := .engine }}
{{- $name := .name }}
{{- $selector := .selector }}
{{- $cache := $engine.modelCache }}
{{- $group := include "yardstick.groupKind" (dict "root" .root "engine" $engine) }}
{{- $download := ternary $cache.download "" (ne (include "yardstick.models" $engine | trim) "") }}
{{- $sharedMemory := $engine.sharedMemory | default (ternary "1Gi" "" (gt (int $engine.tensorParallel) 1)) -}}
metadata:
  labels:
    {{- include "yardstick.podLabels" (dict "root" $.root "selector" $selector "own" $engine.podLabels) | nindent 4 }}
  {{- with $engine.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with include "yardstick.pullSecrets" $.root }}{{ . | nindent 2 }}{{ end }}
  {{- with include "yardstick.engineAccount" (dict "name" $name "engine" $engine) }}
  serviceAccountName: {{ . }}
  {{- end }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add $engine.drainSeconds $engine.graceSeconds 10 }}
  securityContext:
    {{- toYaml $.root.Values.podSecurityContext | nindent 4 }}
  {{- with include "yardstick.placement" (dict "root" $.root "values" $engine "selector" $selector) }}{{ . | nindent 2 }}{{ end }}
  {{- with $engine.resourceClaims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if or $download $engine.initContainers }}
  initContainers:
    {{- if $download }}
    - {{ include "yardstick.downloadContainer" (dict "root" $.root "engine" $engine "waits" (eq $download "job")) | nindent 6 | trim }}
    {{- end }}
    {{- with $engine.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: engine
      image: {{ include "yardstick.engineImage" (dict "root" $.root "engine" $engine) }}
      imagePullPolicy: {{ $.root.Values.image.pullPolicy }}
      {{- if eq $group "StatefulSet" }}
      # a pod's number is that of its group
      command:
        - sh
        - -c
        - exec python -m yardstick_llm.engine "$@" "--dist-init-addr={{ include "yardstick.rankName" (dict "name" $name "rank" 0) }}-${HOSTNAME##*-}.{{ include "yardstick.ranksName" $name }}:8102"
        - sh
      {{- else }}
      command: [python, -m, yardstick_llm.engine]
      {{- end }}
      args:
        - --model={{ $engine.model | default "/opt/yardstick/demo" }}
        {{- if $engine.servedName }}
        - --name={{ $engine.servedName }}
        {{- else if not $engine.model }}
        - --name=yardstick-demo
        {{- end }}
        {{- if $engine.lenvmModel }}
        - --lenvm-model={{ $engine.lenvmModel }}
        {{- else if not $engine.model }}
        - --lenvm-model=/opt/yardstick/demo-lenvm
        {{- end }}
        {{- with $engine.revision }}
        - --revision={{ . }}
        {{- end }}
        {{- with $engine.lenvmRevision }}
        - --lenvm-revision={{ . }}
        {{- end }}
        - --host=*
        - --port=8100
        - --health-port=8101
        - --token-file=/etc/yardstick/token
        - --grace-seconds={{ $engine.graceSeconds }}
        - --attention={{ $engine.attention }}
        {{- with $engine.threads }}
        - --threads={{ . }}
        {{- end }}
        - --tensor-parallel={{ $engine.tensorParallel }}
        {{- if eq $group "StatefulSet" }}
        - --nnodes={{ $engine.groupSize }}
        - --node-rank={{ .rank }}
        {{- else if $group }}
        # LeaderWorkerSet sets these variables
        - --nnodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        - --dist-init-addr=$(LWS_LEADER_ADDRESS):8102
        {{- end }}
        {{- if gt (int $engine.expertParallel) 1 }}
        - --expert-parallel={{ int $engine.expertParallel }}
        {{- end }}
        {{- with $engine.maxRunningRequests }}
        - --max-running-requests={{ int . }}
        {{- end }}
        {{- with $engine.promptLookup }}
        - --prompt-lookup={{ int . }}
        {{- end }}
        {{- if ne $engine.forecast "none" }}
        - --forecast={{ $engine.forecast }}
        {{- end }}
        {{- with $engine.maxImageTokens }}
        - --max-image-tokens={{ int . }}
        {{- end }}
        {{- with $engine.imageCacheMib }}
        - --image-cache-mib={{ int . }}
        {{- end }}
        - --max-waiting={{ int $engine.maxWaiting }}
        - --max-wait-seconds={{ $engine.maxWaitSeconds }}
        {{- with include "yardstick.device" $engine }}
        - --device={{ . }}
        {{- end }}
        {{- with $engine.dtype }}
        - --dtype={{ . }}
        {{- end }}
        {{- with $engine.quantize }}
        - --quantize={{ . }}
        {{- end }}
        {{- if ne $engine.kvDtype "auto" }}
        - --kv-dtype={{ $engine.kvDtype }}
        {{- end }}
        {{- with $engine.maxTotalTokens }}
        - --max-total-tokens={{ int . }}
        {{- end }}
        {{- with $engine.reservedShare }}
        - --reserved-share={{ . }}
        {{- end }}
        {{- with $engine.maxContext }}
        - --max-context={{ int . }}
        {{- end }}
        {{- with $engine.maxBatchedTokens }}
        - --max-batched-tokens={{ int . }}
        {{- end }}
        {{- with $engine.stallSeconds }}
        - --stall-seconds={{ . }}
        {{- end }}
        {{- range $adapter, $path := $engine.lora.adapters }}
        - {{ printf "--lora=%s=%s" $adapter $path | quote }}
        {{- end }}
        {{- with $engine.lora.directory | default (ternary "" "/adapters" (empty $engine.lora.existingClaim)) }}
        - --lora-directory={{ . }}
        {{- end }}
        {{- with $engine.lora.root }}
        - --lora-root={{ . }}
        {{- end }}
        {{- with $engine.lora.maxLoras }}
        - --max-loras={{ int . }}
        {{- end }}
        {{- with $engine.lora.maxLorasDevice }}
        - --max-loras-device={{ int . }}
        {{- end }}
        {{- with $engine.lora.maxLoraRank }}
        - --max-lora-rank={{ int . }}
        {{- end }}
        {{- with $engine.lora.modules }}
        - --lora-modules={{ . }}
        {{- end }}
        {{- with $.root.Values.tracing.endpoint }}
        - --tracing-endpoint={{ . }}
        {{- end }}
        {{- range $engine.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      env:
        # Caches have a volume of their own, because that of the models may be read-only.
        {{- include "yardstick.cacheEnv" $.root | nindent 8 }}
        - {name: TRITON_CACHE_DIR, value: /cache/triton}
        - {name: FLASHINFER_WORKSPACE_BASE, value: /cache}
        {{- if or $cache.readOnly $download }}
        - {name: HF_HUB_OFFLINE, value: "1"}
        {{- end }}
        {{- with include "yardstick.tracingHeaders" $.root }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- if not $download }}
        {{- with include "yardstick.hubToken" $engine }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- end }}
        {{- with $engine.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: wire, containerPort: 8100, protocol: TCP}
        - {name: health, containerPort: 8101, protocol: TCP}
        {{- if and $group (eq (toString .rank) "0") }}
        - {name: dist, containerPort: 8102, protocol: TCP}
        {{- end }}
      startupProbe:
        httpGet: {path: /readyz, port: health}
        periodSeconds: 2
        failureThreshold: {{ div (add $engine.startupSeconds 1) 2 }}
      readinessProbe:
        httpGet: {path: /readyz, port: health}
        periodSeconds: 2
        timeoutSeconds: 3
        failureThreshold: 2
      livenessProbe:
        # /livez itself waits until the loop has stood still for long; this adds patience with a slow HTTP process only
        httpGet: {path: /livez, port: health}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 4
      lifecycle:
        preStop:
          exec:
            command: [sleep, {{ $engine.drainSeconds | quote }}]
      resources:
        {{- include "yardstick.engineResources" $engine | nindent 8 }}
      securityContext:
        {{- include "yardstick.containerSecurity" $.root | nindent 8 }}
      volumeMounts:
        - {name: token, mountPath: /etc/yardstick, readOnly: true}
        - {name: models, mountPath: /models{{ if $cache.readOnly }}, readOnly: true{{ end }}}
        - {name: cache, mountPath: /cache}
        - {name: tmp, mountPath: /tmp}
        {{- if $engine.lora.existingClaim }}
        - {name: adapters, mountPath: /adapters, readOnly: true}
        {{- end }}
        {{- if $sharedMemory }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
        {{- with $engine.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $engine.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: token
      secret:
        secretName: {{ include "yardstick.tokenSecret" $.root }}
        items: [{key: token, path: token}]
    - name: tmp
      emptyDir: {}
    - name: cache
      emptyDir: {}
    {{- with $cache.existingClaim }}
    - name: models
      persistentVolumeClaim:
        claimName: {{ . }}
        {{- if $cache.readOnly }}
        readOnly: true
        {{- end }}
    {{- else }}
    {{- if not $cache.persistent }}
    - name: models
      emptyDir: {}
    {{- end }}
    {{- end }}
    {{- with $engine.lora.existingClaim }}
    - name: adapters
      persistentVolumeClaim:
        claimName: {{ . }}
        readOnly: true
    {{- end }}
    {{- with $sharedMemory }}
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ . }}
    {{- end }}
    {{- with $engine.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* Kind of the objects that hold the groups of a pool; empty where a pod is an engine: (dict "root" $ "engine" VALUES) */}}
{{- define "yardstick.groupKind" -}}
{{- if gt (int .engine.groupSize) 1 -}}
{{- .engine.groupKind | default (ternary "LeaderWorkerSet" "StatefulSet" (.root.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1")) -}}
{{- end -}}
{{- end }}

{{/* Name of the StatefulSet with the pods of one rank of all groups of a pool: (dict "name" NAME-OF-THE-POOL "rank" RANK) */}}
{{- define "yardstick.rankName" -}}
{{- include "yardstick.shortened" (list (printf "%s-rank-%d" .name (int .rank)) 52) -}}
{{- end }}

{{/* Name of the Service by which the ranks of a pool's groups find rank 0, from the name of the pool */}}
{{- define "yardstick.ranksName" -}}
{{- include "yardstick.shortened" (list (printf "%s-ranks" .) 63) -}}
{{- end }}

{{/* Name of the LeaderWorkerSet with the groups of a pool, from the name of the pool. Its controller makes a Service of this name */}}
{{- define "yardstick.groupName" -}}
{{- include "yardstick.shortened" (list (printf "%s-group" .) 46) -}}
{{- end }}

{{/* Claims of a StatefulSet's pods, from the values of a pool */}}
{{- define "yardstick.engineClaims" -}}
{{- $cache := .modelCache }}
  {{- if and $cache.persistent (not $cache.existingClaim) }}
  volumeClaimTemplates:
    - metadata:
        name: models
      spec:
        accessModes:
          {{- toYaml $cache.accessModes | nindent 10 }}
        {{- with $cache.storageClass }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ $cache.size }}
  {{- end }}
{{- end }}
