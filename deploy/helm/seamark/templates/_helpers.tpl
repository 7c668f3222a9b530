{{- define "seamark.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "seamark.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "seamark.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "seamark.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "seamark.selector" -}}
app.kubernetes.io/name: {{ include "seamark.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "seamark.labels" -}}
{{ include "seamark.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "seamark.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "seamark.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "seamark.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{- define "seamark.scheme" -}}
{{- if .Values.secrets.tls.name }}https{{ else }}http{{ end -}}
{{- end -}}

{{- define "seamark.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "seamark.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "seamark.secretVariable" -}}
{{- if .secret.name }}
- name: {{ .variable }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret.name }}
      key: {{ .key | default .secret.key }}
{{- end }}
{{- end -}}

{{/* The settings file. JSON's strings, numbers, booleans and lists are TOML's. */}}
{{- define "seamark.toml" -}}
{{- range $name, $value := .Values.settings }}
{{ $name }} = {{ toRawJson $value }}
{{- end }}
{{- if .Values.streamLog }}
stream_log = {{ toRawJson .Values.streamLog }}
{{- end }}
{{- end -}}
