// Command runner takes jobs of a Gitea server and executes their steps on this host: Gitea's runner protocol in
// front of the executor that Gitea's own runner uses. That runner is on no module proxy.
//
//	runner -server URL -name NAME -labels A,B -registration TOKEN   register, print the credentials as JSON
//	runner -server URL -credentials FILE -work DIR -jobs N          take jobs until SIGTERM; a job then goes on
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	runnerv1 "code.gitea.io/actions-proto-go/runner/v1"
	"code.gitea.io/actions-proto-go/runner/v1/runnerv1connect"
	"connectrpc.com/connect"
	"github.com/nektos/act/pkg/common"
	"github.com/nektos/act/pkg/model"
	"github.com/nektos/act/pkg/runner"
	"github.com/sirupsen/logrus"
	"go.yaml.in/yaml/v4"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	version  = "v0.3.0" // of the protocol, as Gitea's own runner names it
	interval = 500 * time.Millisecond
)

type credentials struct {
	UUID  string `json:"uuid"`
	Token string `json:"token"`
}

type machine struct {
	server string
	work   string
	own    credentials
	api    runnerv1connect.RunnerServiceClient
}

func main() {
	server := flag.String("server", "", "address of the Gitea server")
	name := flag.String("name", "", "name to register under")
	labels := flag.String("labels", "", "labels to register with, separated by commas")
	registration := flag.String("registration", "", "registration token")
	file := flag.String("credentials", "", "file with what registering printed")
	work := flag.String("work", "", "folder for the jobs")
	jobs := flag.Int("jobs", 1, "how many jobs at once")
	flag.Parse()
	var err error
	if *registration != "" {
		err = register(*server, *registration, *name, strings.Split(*labels, ","))
	} else {
		err = serve(*server, *file, *work, *jobs)
	}
	if err != nil {
		logrus.Fatal(err)
	}
}

func client(server string, own credentials) runnerv1connect.RunnerServiceClient {
	signed := connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, call connect.AnyRequest) (connect.AnyResponse, error) {
			if own.UUID != "" {
				call.Header().Set("x-runner-uuid", own.UUID)
				call.Header().Set("x-runner-token", own.Token)
			}
			return next(ctx, call)
		}
	})
	return runnerv1connect.NewRunnerServiceClient(http.DefaultClient, server+"/api/actions", connect.WithInterceptors(signed))
}

func register(server, token, name string, labels []string) error {
	ask := &runnerv1.RegisterRequest{Name: name, Token: token, Version: version, Labels: labels}
	answer, err := client(server, credentials{}).Register(context.Background(), connect.NewRequest(ask))
	if err != nil {
		return err
	}
	got := answer.Msg.Runner
	return json.NewEncoder(os.Stdout).Encode(credentials{UUID: got.Uuid, Token: got.Token})
}

func serve(server, file, work string, jobs int) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	m := &machine{server: server}
	if err := json.Unmarshal(data, &m.own); err != nil {
		return err
	}
	if m.work, err = filepath.Abs(work); err != nil {
		return err
	}
	m.api = client(server, m.own)
	stopped, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	var all sync.WaitGroup
	for range jobs {
		all.Go(func() { m.takeJobs(stopped) })
	}
	all.Wait()
	return nil
}

func (m *machine) takeJobs(stopped context.Context) {
	for stopped.Err() == nil {
		answer, err := m.api.FetchTask(stopped, connect.NewRequest(&runnerv1.FetchTaskRequest{}))
		switch {
		case err == nil && answer.Msg.Task != nil:
			m.do(answer.Msg.Task)
			continue
		case err != nil && stopped.Err() == nil:
			logrus.Warn("no answer: ", err)
		}
		select {
		case <-stopped.Done():
		case <-time.After(interval):
		}
	}
}

// do executes the one job of a task and reports on it until the server has its result.
func (m *machine) do(task *runnerv1.Task) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r := &reporter{api: m.api, cancelJob: cancel, state: &runnerv1.TaskState{Id: task.Id, StartedAt: timestamppb.Now()}}
	r.secrets = []string{text(task, "token"), text(task, "gitea_runtime_token")}
	for _, secret := range task.Secrets {
		r.secrets = append(r.secrets, secret)
	}
	reported := make(chan struct{})
	go func() {
		defer close(reported)
		for ctx.Err() == nil {
			r.send(false)
			select {
			case <-ctx.Done():
			case <-time.After(interval):
			}
		}
	}()
	outputs, err := m.execute(ctx, task, r)
	cancel()
	<-reported
	r.outputs = outputs
	r.finish(err)
	logrus.Infof("job %d: %s", task.Id, r.state.Result)
}

// execute runs the job's steps as processes of this host; it returns the job's outputs.
func (m *machine) execute(ctx context.Context, task *runnerv1.Task, r *reporter) (map[string]string, error) {
	workflow, id, err := read(task)
	if err != nil {
		return nil, err
	}
	job := workflow.GetJob(id)
	r.lock.Lock()
	for i := range job.Steps {
		r.state.Steps = append(r.state.Steps, &runnerv1.StepState{Id: int64(i)})
	}
	r.lock.Unlock()
	plan, err := model.CombineWorkflowPlanner(workflow).PlanJob(id)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(m.work, fmt.Sprint(task.Id))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	event := task.Context.Fields["event"].GetStructValue().AsMap()
	eventJSON, err := json.Marshal(event)
	if err != nil {
		return nil, err
	}
	secrets := map[string]string{"GITHUB_TOKEN": text(task, "token")}
	for name, value := range task.Secrets {
		secrets[name] = value
	}
	level := logrus.InfoLevel
	executor, err := runner.New(&runner.Config{
		Workdir:               dir,
		ActionCacheDir:        filepath.Join(m.work, "actions"),
		DefaultActionInstance: text(task, "gitea_default_actions_url"),
		GitHubInstance:        m.server,
		NoSkipCheckout:        true,
		AutoRemove:            true,
		LogOutput:             true,
		JobLoggerLevel:        &level,
		Env:                   environment(),
		Secrets:               secrets,
		Vars:                  task.Vars,
		Token:                 text(task, "token"),
		EventJSON:             string(eventJSON),
		PlatformPicker:        func([]string) string { return "-self-hosted" },
		PresetGitHubContext: &model.GithubContext{
			Event:           event,
			EventName:       text(task, "event_name"),
			Actor:           text(task, "actor"),
			Repository:      text(task, "repository"),
			RepositoryOwner: text(task, "repository_owner"),
			Sha:             text(task, "sha"),
			Ref:             text(task, "ref"),
			RefName:         text(task, "ref_name"),
			RefType:         text(task, "ref_type"),
			HeadRef:         text(task, "head_ref"),
			BaseRef:         text(task, "base_ref"),
			RunID:           text(task, "run_id"),
			RunNumber:       text(task, "run_number"),
			RunAttempt:      text(task, "run_attempt"),
			RetentionDays:   text(task, "retention_days"),
			Token:           text(task, "token"),
		},
	})
	if err != nil {
		return nil, err
	}
	err = executor.NewPlanExecutor(plan)(common.WithLoggerHook(common.WithJobErrorContainer(ctx), r))
	return job.Outputs, err
}

// read returns the workflow of a task, whose one job is completed by the results of those that it needs.
func read(task *runnerv1.Task) (*model.Workflow, string, error) {
	workflow, err := model.ReadWorkflow(bytes.NewReader(task.WorkflowPayload))
	if err != nil {
		return nil, "", err
	}
	ids := workflow.GetJobIDs()
	if len(ids) != 1 {
		return nil, "", fmt.Errorf("a task has one job, not %d", len(ids))
	}
	needs := yaml.Node{Kind: yaml.SequenceNode}
	for id, need := range task.Needs {
		result := strings.ToLower(strings.TrimPrefix(need.Result.String(), "RESULT_"))
		workflow.Jobs[id] = &model.Job{Outputs: need.Outputs, Result: result}
		needs.Content = append(needs.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: id})
	}
	workflow.Jobs[ids[0]].RawNeeds = needs
	return workflow, ids[0], nil
}

// environment is this process's own: whoever starts it decides what the steps see.
func environment() map[string]string {
	found := map[string]string{}
	for _, each := range os.Environ() {
		name, value, _ := strings.Cut(each, "=")
		found[name] = value
	}
	return found
}

func text(task *runnerv1.Task, name string) string { return task.Context.Fields[name].GetStringValue() }

// reporter is told of every log line and sends lines, steps and the result to the server.
type reporter struct {
	api       runnerv1connect.RunnerServiceClient
	cancelJob context.CancelFunc
	secrets   []string
	outputs   map[string]string

	lock      sync.Mutex
	state     *runnerv1.TaskState
	rows      []*runnerv1.LogRow // not acknowledged yet
	sent      int64              // lines that the server has acknowledged
	cancelled bool
}

func (r *reporter) Levels() []logrus.Level { return logrus.AllLevels }

func (r *reporter) Fire(entry *logrus.Entry) error {
	r.lock.Lock()
	defer r.lock.Unlock()
	now := timestamppb.New(entry.Time)
	if result, ok := entry.Data["jobResult"]; ok {
		r.state.Result = resultOf(result)
	}
	var step *runnerv1.StepState
	if number, ok := entry.Data["stepNumber"].(int); ok && number < len(r.state.Steps) && fmt.Sprint(entry.Data["stage"]) == "Main" {
		step = r.state.Steps[number]
		if step.StartedAt == nil {
			step.StartedAt, step.LogIndex = now, r.sent+int64(len(r.rows))
		}
		step.LogLength++
		if result, ok := entry.Data["stepResult"]; ok {
			step.Result, step.StoppedAt = resultOf(result), now
		}
	}
	r.add(now, entry.Message)
	return nil
}

func resultOf(word any) runnerv1.Result {
	return runnerv1.Result(runnerv1.Result_value["RESULT_"+strings.ToUpper(fmt.Sprint(word))])
}

func (r *reporter) add(now *timestamppb.Timestamp, line string) {
	line = strings.ToValidUTF8(strings.TrimRight(line, "\r\n"), "?")
	for _, secret := range r.secrets {
		if secret != "" {
			line = strings.ReplaceAll(line, secret, "***")
		}
	}
	r.rows = append(r.rows, &runnerv1.LogRow{Time: now, Content: line})
}

// send brings the server up to date; a job that was cancelled there is stopped here.
func (r *reporter) send(last bool) error {
	r.lock.Lock()
	rows, index := slices.Clone(r.rows), r.sent
	state := proto.Clone(r.state).(*runnerv1.TaskState)
	r.lock.Unlock()
	if !last {
		state.Result = runnerv1.Result_RESULT_UNSPECIFIED // the outputs are still missing
	}
	ctx := context.Background()
	log := &runnerv1.UpdateLogRequest{TaskId: state.Id, Index: index, Rows: rows, NoMore: last}
	acknowledged, err := r.api.UpdateLog(ctx, connect.NewRequest(log))
	if err != nil {
		return err
	}
	r.lock.Lock()
	r.rows, r.sent = r.rows[acknowledged.Msg.AckIndex-r.sent:], acknowledged.Msg.AckIndex
	r.lock.Unlock()
	answer, err := r.api.UpdateTask(ctx, connect.NewRequest(&runnerv1.UpdateTaskRequest{State: state, Outputs: r.outputs}))
	if err == nil && answer.Msg.State.GetResult() == runnerv1.Result_RESULT_CANCELLED && !last {
		r.lock.Lock()
		r.cancelled = true
		r.lock.Unlock()
		r.cancelJob()
	}
	return err
}

func (r *reporter) finish(failure error) {
	r.lock.Lock()
	now := timestamppb.Now()
	if failure != nil && !errors.Is(failure, context.Canceled) {
		r.add(now, failure.Error())
	}
	switch {
	case r.cancelled:
		r.state.Result = runnerv1.Result_RESULT_CANCELLED
	case r.state.Result == runnerv1.Result_RESULT_UNSPECIFIED:
		r.state.Result = runnerv1.Result_RESULT_FAILURE
	}
	r.state.StoppedAt = now
	for _, step := range r.state.Steps {
		if step.Result == runnerv1.Result_RESULT_UNSPECIFIED {
			step.Result, step.StoppedAt = runnerv1.Result_RESULT_SKIPPED, now
		}
	}
	r.lock.Unlock()
	for range 60 { // the server may be restarting
		err := r.send(true)
		if err == nil {
			return
		}
		logrus.Warn("the result is not delivered yet: ", err)
		time.Sleep(time.Second)
	}
}
