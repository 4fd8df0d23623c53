{{- define "layertap.name" -}}
{{- /* A Service named just "layertap" has Kubernetes set LAYERTAP_PORT in pods; enableServiceLinks is off all the same. */ -}}
{{- $name := printf "%s-%s" .Release.Name .Chart.Name -}}
{{- if contains .Chart.Name .Release.Name }}{{ $name = .Release.Name }}{{ end -}}
{{- $name | trunc 58 | trimSuffix "-" -}}
{{- end }}

{{- define "layertap.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "layertap.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "layertap.selector" . }}
{{- end }}

{{- define "layertap.secret" -}}
{{ .Values.keys.existingSecret | default (printf "%s-keys" (include "layertap.name" .)) }}
{{- end }}


{{- /* What follows SIGTERM: the delay, then answers for up to the deadline, then 5 s for the rest. */ -}}
{{- define "layertap.graceSeconds" -}}
{{ add (ceil (float64 .Values.settings.DRAIN_DELAY_S)) (ceil (float64 .Values.settings.DEADLINE_S)) 5 }}
{{- end }}
