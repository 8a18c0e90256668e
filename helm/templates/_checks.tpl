{{/* Checks of values that contradict each other. Each message names the value to change. Rendered once, by gateway.yaml */}}
{{- define "yardstick.check" -}}
{{- $name := include "yardstick.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "objects would be named %s, but names of Services begin with a letter and have letters, digits and hyphens only; set `fullnameOverride`, or install under another name" $name) -}}
{{- end -}}
{{- $services := list $name (include "yardstick.redisName" .) -}}
{{- range $pool, $_ := include "yardstick.pools" . | fromYaml -}}
{{- $services = append $services (include "yardstick.poolName" (dict "root" $ "pool" $pool)) -}}
{{- end -}}
{{- range $service := $services -}}
{{- $found := (lookup "v1" "Service" $.Release.Namespace $service).metadata | default dict -}}
{{- $owner := get ($found.annotations | default dict) "meta.helm.sh/release-name" | default $.Release.Name -}}
{{- if ne $owner $.Release.Name -}}
{{- fail (printf "the Service %s of this namespace belongs to the release %s; install into another namespace, or set `fullnameOverride`" $service $owner) -}}
{{- end -}}
{{- end -}}
{{- with .Values.gateway.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "`gateway.autoscaling.minReplicas` is %d and `maxReplicas` is %d; raise `maxReplicas`" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.gateway.service -}}
{{- if and .loadBalancerClass (ne .type "LoadBalancer") -}}
{{- fail (printf "`gateway.service.loadBalancerClass` is for Services of the type LoadBalancer, and `gateway.service.type` is %s" .type) -}}
{{- end -}}
{{- if and .externalTrafficPolicy (eq .type "ClusterIP") -}}
{{- fail "`gateway.service.externalTrafficPolicy` is for Services of the types NodePort and LoadBalancer, and `gateway.service.type` is ClusterIP" -}}
{{- end -}}
{{- end -}}
{{- with .Values.monitoring -}}
{{- if and .serviceMonitor.enabled .podMonitor.enabled -}}
{{- fail "`monitoring.serviceMonitor` and `monitoring.podMonitor` would both read each pod, and sums over series would count it twice; enable one of them" -}}
{{- end -}}
{{- end -}}
{{- with .Values.loadTest -}}
{{- if and .enabled (not .url) (not .keySecret) (ne (include "yardstick.makesKey" $) "true") -}}
{{- fail "`loadTest` needs an API key, and the chart generates none; set `loadTest.keySecret`" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Fails where the values of a pool contradict each other: (dict "root" $ "pool" NAME "engine" VALUES) */}}
{{- define "yardstick.checkPool" -}}
{{- include "yardstick.checkDevices" . -}}
{{- include "yardstick.checkVolumes" . -}}
{{- $pool := .pool -}}
{{- with .engine.autoscaling -}}
{{- if and .enabled (eq .kind "hpa") (eq (int .minReplicas) 0) -}}
{{- fail (printf "the pool %s: an HPA does not scale to zero; set `autoscaling.kind` to keda" $pool) -}}
{{- end -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "the pool %s: `autoscaling.minReplicas` is %d and `maxReplicas` is %d; raise `maxReplicas`" $pool (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- $group := include "yardstick.groupKind" . -}}
{{- if and (eq $group "StatefulSet") .engine.autoscaling.enabled -}}
{{- fail (printf "the pool %s: `autoscaling` changes the StatefulSet of one rank only; install LeaderWorkerSet for groups that are scaled, or set `groupSize` to 1" $pool) -}}
{{- end -}}
{{- if and (eq $group "LeaderWorkerSet") (or (eq .engine.updateStrategy.type "OnDelete") (and .engine.modelCache.persistent (not .engine.modelCache.existingClaim))) -}}
{{- fail (printf "the pool %s: a LeaderWorkerSet has neither claims of its pods nor OnDelete; set `modelCache.existingClaim`, or `groupKind` to StatefulSet" $pool) -}}
{{- end -}}
{{- if and $group .engine.podDisruptionBudget.enabled (kindIs "string" .engine.podDisruptionBudget.maxUnavailable) -}}
{{- fail (printf "the pool %s: `podDisruptionBudget.maxUnavailable` is a share of pods, and each pod of a group takes the whole group away; set the number of groups that may be missing" $pool) -}}
{{- end -}}
{{- $lora := .engine.lora -}}
{{- if or $lora.adapters $lora.existingClaim $lora.directory $lora.root -}}
{{- if gt (int .engine.tensorParallel) 1 -}}
{{- fail (printf "the pool %s: LoRA adapters do not go with `tensorParallel`; set it to 1, or remove the values under `lora`" $pool) -}}
{{- end -}}
{{- if ne .engine.kvDtype "auto" -}}
{{- fail (printf "the pool %s: LoRA adapters do not go with `kvDtype: fp8`; set it to auto, or remove the values under `lora`" $pool) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* GPUs, processes and the device of a pool: (dict "pool" NAME "engine" VALUES) */}}
{{- define "yardstick.checkDevices" -}}
{{- $gpus := include "yardstick.gpus" .engine | int -}}
{{- $processes := int .engine.tensorParallel -}}
{{- $size := int .engine.groupSize -}}
{{- $experts := int .engine.expertParallel -}}
{{- $device := .engine.device -}}
{{- $claims := .engine.resources.claims | default list -}}
{{- $unseen := or $claims .engine.runtimeClassName (include "yardstick.otherDevices" .engine) -}}
{{- if and .engine.resourceClaims (not $device) -}}
{{- fail (printf "the pool %s has `resourceClaims`, and the chart cannot see whether they are GPUs; set `device` to cuda or to cpu" .pool) -}}
{{- end -}}
{{- if and (gt $gpus 0) (eq $device "cpu") -}}
{{- fail (printf "the pool %s has GPUs and `device` is cpu; set `resources.limits` to {}" .pool) -}}
{{- end -}}
{{- if and (eq $device "cuda") (eq $gpus 0) (not $unseen) -}}
{{- fail (printf "the pool %s has 0 GPUs and `device` is cuda; set `resources.limits.\"nvidia.com/gpu\"`, or `resourceClaims` and `resources.claims`, or the `runtimeClassName` that gives pods GPUs" .pool) -}}
{{- end -}}
{{- if and (gt $size 1) (ne (mod $processes $size) 0) -}}
{{- fail (printf "the pool %s: `groupSize` is %d and `tensorParallel` is %d; set `tensorParallel` to the number of processes in all pods of a group together, as many in each" .pool $size $processes) -}}
{{- end -}}
{{- if and (ne $device "cpu") (or (gt $gpus 1) (gt $processes 1)) (ne (mul $gpus $size | int) $processes) (not (and (eq $gpus 0) (eq $device "cuda"))) -}}
{{- $shared := ternary "" (printf " in groups of %d pods" $size) (eq $size 1) -}}
{{- fail (printf "the pool %s has %d GPUs and `tensorParallel` is %d%s; set `resources.limits.\"nvidia.com/gpu\"` to the same number%s, or `device` to cpu and no GPU" .pool $gpus $processes $shared (ternary "" " divided by `groupSize`" (eq $size 1))) -}}
{{- end -}}
{{- if and (ne $experts 1) (ne $experts $processes) -}}
{{- fail (printf "the pool %s: `expertParallel` is %d, and must be 1 or the number of `tensorParallel`, which is %d" .pool $experts $processes) -}}
{{- end -}}
{{- end }}

{{/* "true" if the limits of a pool have a device whose number of GPUs the chart does not know, such as a vendor's share of a GPU */}}
{{- define "yardstick.otherDevices" -}}
{{- range $name, $number := .resources.limits -}}
{{- if contains "/" $name }}true{{ end -}}
{{- end -}}
{{- end }}

{{/* The volume of a pool's models: (dict "pool" NAME "engine" VALUES) */}}
{{- define "yardstick.checkVolumes" -}}
{{- $pool := .pool -}}
{{- with .engine.modelCache -}}
{{- if and (eq .download "job") (not .existingClaim) -}}
{{- fail (printf "the pool %s: `modelCache.download: job` fills a claim that all pods share; set `modelCache.existingClaim`" $pool) -}}
{{- end -}}
{{- if and (eq .download "init") .readOnly -}}
{{- fail (printf "the pool %s: `modelCache.download: init` writes to the volume; set `modelCache.readOnly` to false, or `download` to job" $pool) -}}
{{- end -}}
{{- if and .readOnly (not .existingClaim) -}}
{{- fail (printf "the pool %s: a new volume has no models and `modelCache.readOnly` admits none; set `modelCache.existingClaim`, or `readOnly` to false" $pool) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Entries of the key file, of which the schema checks each field: fails where a gateway would not take an entry (gateway/keys.py) */}}
{{- define "yardstick.checkKeys" -}}
{{- $names := dict -}}
{{- $owners := dict -}}
{{- range . -}}
{{- $digest := lower .sha256 -}}
{{- if hasKey $names .name -}}
{{- fail (printf "`auth.keys`: two keys are named %s; rename one (`first` is the generated key, unless `auth.generateFirstKey` is false)" .name) -}}
{{- end -}}
{{- if hasKey $owners $digest -}}
{{- fail (printf "`auth.keys`: %s and %s have the same `sha256`; remove one of them" (get $owners $digest) .name) -}}
{{- end -}}
{{- if eq $digest (sha256sum "") -}}
{{- fail (printf "`auth.keys`: the `sha256` of %s is the hash of an empty key" .name) -}}
{{- end -}}
{{- $lowest := ternary .priority_min -100 (hasKey . "priority_min") | int64 -}}
{{- $highest := ternary .priority_max 100 (hasKey . "priority_max") | int64 -}}
{{- if gt $lowest $highest -}}
{{- fail (printf "`auth.keys`: %s has the `priority_min` %d and the `priority_max` %d; raise `priority_max`" .name $lowest $highest) -}}
{{- end -}}
{{- with .expires -}}
{{- $day := trunc 10 . -}}
{{- if or (hasPrefix "0000" $day) (ne $day (toDate "2006-01-02" $day | date "2006-01-02")) -}}
{{- fail (printf "`auth.keys`: there is no day %s; correct `expires`" $day) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- $_ := set $owners $digest .name -}}
{{- end -}}
{{- end }}
