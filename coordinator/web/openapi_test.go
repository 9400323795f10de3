package web

import (
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
)

// document is what the tests read of the OpenAPI document.
type document struct {
	OpenAPI    string                          `yaml:"openapi"`
	Paths      map[string]map[string]operation `yaml:"paths"`
	Components struct {
		Schemas map[string]schema `yaml:"schemas"`
	} `yaml:"components"`
}

type operation struct {
	Security *[]map[string][]string `yaml:"security"`
}

type schema struct {
	Required   []string          `yaml:"required"`
	Properties map[string]schema `yaml:"properties"`
	Items      *schema           `yaml:"items"`
	Enum       []string          `yaml:"enum"`
}

func readDocument(t *testing.T) document {
	t.Helper()
	var d document
	require.NoError(t, yaml.Unmarshal(openAPI, &d))
	require.Equal(t, "3.1.0", d.OpenAPI)
	return d
}

func TestDocumentListsExactlyTheRoutes(t *testing.T) {
	t.Parallel()
	d := readDocument(t)
	documented := make(map[string]bool) // true: asks for a key
	for path, methods := range d.Paths {
		for method, op := range methods {
			documented[strings.ToUpper(method)+" "+path] = op.Security == nil
		}
	}
	routed := make(map[string]bool)
	for _, rt := range newWorld(t, nil).server.routes() {
		routed[rt.method+" "+rt.pattern] = rt.role != open
	}
	require.Equal(t, routed, documented)
}

// TestDocumentShapesAreTheWireTypes holds the document to the types that the
// server encodes and the client decodes.
func TestDocumentShapesAreTheWireTypes(t *testing.T) {
	t.Parallel()
	d := readDocument(t)
	items := func(s schema, name string) schema { return *s.Properties[name].Items }
	cluster := d.Components.Schemas["Cluster"]
	school := d.Components.Schemas["School"]
	for name, c := range map[string]struct {
		schema schema
		of     any
	}{
		"NoticeRequest":   {d.Components.Schemas["NoticeRequest"], api.NoticeRequest{}},
		"Recipient":       {d.Components.Schemas["Recipient"], api.Recipient{}},
		"Accepted":        {d.Components.Schemas["Accepted"], api.Accepted{}},
		"Skipped":         {d.Components.Schemas["Skipped"], api.Skipped{}},
		"Notice":          {d.Components.Schemas["Notice"], api.Notice{}},
		"Fallback":        {d.Components.Schemas["Fallback"], api.Fallback{}},
		"Fallbacks":       {d.Components.Schemas["Fallbacks"], api.Fallbacks{}},
		"RecipientStatus": {d.Components.Schemas["RecipientStatus"], api.RecipientStatus{}},
		"DevicesRequest":  {d.Components.Schemas["DevicesRequest"], api.DevicesRequest{}},
		"NewDevice":       {d.Components.Schemas["NewDevice"], api.NewDevice{}},
		"Registered":      {d.Components.Schemas["Registered"], api.Registered{}},
		"DeletedDevice":   {d.Components.Schemas["DeletedDevice"], api.DeletedDevice{}},
		"Device":          {d.Components.Schemas["Device"], api.Device{}},
		"Brake":           {d.Components.Schemas["Brake"], api.Brake{}},
		"Failure":         {d.Components.Schemas["Failure"], api.Failure{}},
		"RequeueRequest":  {d.Components.Schemas["RequeueRequest"], api.RequeueRequest{}},
		"Requeued":        {d.Components.Schemas["Requeued"], api.Requeued{}},
		"RequeueLeft":     {d.Components.Schemas["Requeued"].Properties["left"], api.RequeueLeft{}},
		"SchoolChange":    {d.Components.Schemas["SchoolChange"], api.SchoolChange{}},
		"School":          {school, api.School{}},
		"Lock":            {school.Properties["lock"], api.Lock{}},
		"Cluster":         {cluster, api.Cluster{}},
		"Replica":         {items(cluster, "replicas"), api.Replica{}},
		"Sender":          {items(cluster, "senders"), api.Sender{}},
		"Ready":           {d.Components.Schemas["Ready"], api.Ready{}},
		"Version":         {d.Components.Schemas["Version"], api.Version{}},
		"Error":           {d.Components.Schemas["ErrorBody"].Properties["error"], api.Error{}},
	} {
		all, always := jsonFields(reflect.TypeOf(c.of))
		if name == "Error" {
			always = append(always, "request_id") // the server always has one
		}
		require.ElementsMatch(t, all, slices.Collect(maps.Keys(c.schema.Properties)), name)
		require.ElementsMatch(t, always, c.schema.Required, "always there: %s", name)
	}
	require.ElementsMatch(t, stateNames(), school.Properties["state"].Enum)
}

func stateNames() []string {
	return []string{string(api.Paused), string(api.Resting), string(api.Sending), string(api.WaitingForSlot), string(api.WaitingForRetry), string(api.Idle)}
}

// jsonFields lists the JSON names of a struct, and those that are never left out.
func jsonFields(t reflect.Type) (all, always []string) {
	for i := range t.NumField() {
		f := t.Field(i)
		tag := f.Tag.Get("json")
		switch {
		case tag == "-":
		case f.Anonymous && tag == "":
			a, b := jsonFields(f.Type)
			all, always = append(all, a...), append(always, b...)
		default:
			name, rest, _ := strings.Cut(tag, ",")
			all = append(all, name)
			if rest == "" {
				always = append(always, name)
			}
		}
	}
	return all, always
}

// TestDecodersKnowTheWireTypes holds what the server takes to what the client
// can say.
func TestDecodersKnowTheWireTypes(t *testing.T) {
	t.Parallel()
	notice, _ := jsonFields(reflect.TypeFor[api.NoticeRequest]())
	require.ElementsMatch(t, notice, noticeShape.fields)
	fallback, _ := jsonFields(reflect.TypeFor[api.Fallback]())
	require.ElementsMatch(t, fallback, fallbackShape.fields)
	recipient, _ := jsonFields(reflect.TypeFor[api.Recipient]())
	require.ElementsMatch(t, recipient, recipientShape.fields)
	change, _ := jsonFields(reflect.TypeFor[api.SchoolChange]())
	require.ElementsMatch(t, change, schoolShape.fields)
	devices, _ := jsonFields(reflect.TypeFor[api.DevicesRequest]())
	require.ElementsMatch(t, devices, devicesShape.fields)
	device, _ := jsonFields(reflect.TypeFor[api.NewDevice]())
	require.ElementsMatch(t, device, deviceShape.fields)
	requeue, _ := jsonFields(reflect.TypeFor[api.RequeueRequest]())
	require.ElementsMatch(t, requeue, requeueShape.fields)
}

func TestDocumentIsServed(t *testing.T) {
	t.Parallel()
	rec := newWorld(t, nil).get("/openapi.yaml")
	require.Equal(t, http.StatusOK, rec.Code)
	require.Equal(t, "application/yaml", rec.Header().Get("Content-Type"))
	require.Equal(t, openAPI, rec.Body.Bytes())
}
