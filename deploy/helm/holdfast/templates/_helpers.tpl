{{- define "holdfast.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "holdfast.labels" -}}
app.kubernetes.io/name: holdfast-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "holdfast.selector" -}}
app.kubernetes.io/name: holdfast-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
