BEGIN TRANSACTION;
CREATE TABLE torchrelay_api_keys (
	name TEXT NOT NULL, 
	digest BLOB NOT NULL, 
	previous_digest BLOB, 
	document JSON NOT NULL, 
	PRIMARY KEY (name), 
	UNIQUE (digest)
);
INSERT INTO "torchrelay_api_keys" VALUES('team',X'2C70E12B7A0646F92279F427C7B38E7334D8E5389CFF167A1DC30E73F826B683',NULL,'{"name": "team", "role": "infer", "models": ["digits", "plain*"], "limits": {"requests_per_second": null, "burst": null, "rows_per_second": null, "concurrency": null, "tokens_per_minute": null, "requests_per_day": null}, "created": 1.0, "creator": "operator", "expires": null, "rotated": null, "previous_expires": null}');
CREATE TABLE torchrelay_archives (
	model TEXT NOT NULL, 
	version TEXT NOT NULL, 
	digest TEXT NOT NULL, 
	PRIMARY KEY (model, version)
);
INSERT INTO "torchrelay_archives" VALUES('clicks','1.0','636c69636b73312e300000000000000000000000000000000000000000000000');
INSERT INTO "torchrelay_archives" VALUES('clicks','2.0','636c69636b73322e300000000000000000000000000000000000000000000000');
INSERT INTO "torchrelay_archives" VALUES('digits','1.0','646967697473312e300000000000000000000000000000000000000000000000');
INSERT INTO "torchrelay_archives" VALUES('digits','2.0','646967697473322e300000000000000000000000000000000000000000000000');
INSERT INTO "torchrelay_archives" VALUES('digits','3.0','646967697473332e300000000000000000000000000000000000000000000000');
INSERT INTO "torchrelay_archives" VALUES('plain','1.0','706c61696e312e30000000000000000000000000000000000000000000000000');
INSERT INTO "torchrelay_archives" VALUES('plain','2.0','706c61696e322e30000000000000000000000000000000000000000000000000');
INSERT INTO "torchrelay_archives" VALUES('poet','1.0','706f6574312e3000000000000000000000000000000000000000000000000000');
CREATE TABLE torchrelay_async_predictions (
	id TEXT NOT NULL, 
	document JSON NOT NULL, 
	body BLOB, 
	owner TEXT, 
	PRIMARY KEY (id)
);
CREATE TABLE torchrelay_audit_log (
	id INTEGER NOT NULL, 
	time FLOAT NOT NULL, 
	actor TEXT NOT NULL, 
	address TEXT NOT NULL, 
	action TEXT NOT NULL, 
	subject TEXT NOT NULL, 
	result TEXT NOT NULL, 
	"before" JSON, 
	"after" JSON, 
	PRIMARY KEY (id)
);
CREATE TABLE torchrelay_counted_events (
	trial TEXT NOT NULL, 
	hash BIGINT NOT NULL, 
	number BIGINT NOT NULL, 
	PRIMARY KEY (trial, hash), 
	UNIQUE (trial, number)
)
 WITHOUT ROWID

;
CREATE TABLE torchrelay_drift_windows (
	model TEXT NOT NULL, 
	version TEXT NOT NULL, 
	document BLOB NOT NULL, 
	PRIMARY KEY (model, version)
);
CREATE TABLE torchrelay_experiment_stats (
	trial TEXT NOT NULL, 
	document TEXT NOT NULL, 
	PRIMARY KEY (trial)
);
CREATE TABLE torchrelay_experiments (
	id TEXT NOT NULL, 
	document JSON NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "torchrelay_experiments" VALUES('e1','{"name": "try", "arms": {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "2.0", "weight": 5000}}, "metrics": [{"name": "clicked", "kind": "reward", "goal": null, "path": "", "per": "event"}, {"name": "score", "kind": "output", "goal": "decrease", "path": "scores[0]", "per": "exposure"}], "baseline": "a", "key": {"header": "", "cookie": "id", "json": ""}, "salt": "", "id": "e1", "model": "clicks", "state": "running", "started_at": 1.5, "ended_at": 0.0}');
CREATE TABLE torchrelay_exposed_units (
	trial TEXT NOT NULL, 
	hash BIGINT NOT NULL, 
	number BIGINT NOT NULL, 
	arm JSON NOT NULL, 
	bucket INTEGER NOT NULL, 
	PRIMARY KEY (trial, hash), 
	UNIQUE (trial, number)
)
 WITHOUT ROWID

;
CREATE TABLE torchrelay_generation (
	id INTEGER NOT NULL, 
	generation BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "torchrelay_generation" VALUES(1,1);
CREATE TABLE torchrelay_metric_sources (
	source TEXT NOT NULL, 
	number BIGINT NOT NULL, 
	time FLOAT NOT NULL, 
	PRIMARY KEY (source)
);
CREATE TABLE torchrelay_models (
	name TEXT NOT NULL, 
	default_version TEXT NOT NULL, 
	policy JSON NOT NULL, 
	declared JSON, 
	PRIMARY KEY (name)
);
INSERT INTO "torchrelay_models" VALUES('clicks','1.0','{"policy": "default", "versions": {}, "key": null, "salt": "", "header": "", "labels": {}, "shadow": null, "allocation": null}',NULL);
INSERT INTO "torchrelay_models" VALUES('digits','1.0','{"policy": "sticky", "versions": {"1.0": 9000, "2.0": 1000}, "key": {"header": "", "cookie": "", "json": "$.user.id"}, "salt": "salt", "header": "x-version", "labels": {"canary": "2.0"}, "shadow": {"version": "3.0", "percent": 10.0, "compare": {"kind": "text", "at": "$", "rtol": 0.001, "atol": 1e-06, "k": 5, "least": 1.0}, "keep": 20, "redact": ["$.name"], "timeout_s": 30.0}, "allocation": {"bucket_bounds": [9000, 10000], "names": ["1.0", "2.0"]}}','{"policy": "default"}');
INSERT INTO "torchrelay_models" VALUES('pipeline','1.0','{"policy": "default", "versions": {}, "key": null, "salt": "", "header": "", "labels": {}, "shadow": null, "allocation": null}',NULL);
INSERT INTO "torchrelay_models" VALUES('plain','1.0','{"policy": "default", "versions": {}, "key": null, "salt": "", "header": "", "labels": {}, "shadow": null, "allocation": null}',NULL);
INSERT INTO "torchrelay_models" VALUES('poet','1.0','{"policy": "default", "versions": {}, "key": null, "salt": "", "header": "", "labels": {}, "shadow": null, "allocation": null}',NULL);
CREATE TABLE torchrelay_result_history (
	kind TEXT NOT NULL, 
	subject TEXT NOT NULL, 
	time FLOAT NOT NULL, 
	document TEXT NOT NULL, 
	PRIMARY KEY (kind, subject, time)
);
CREATE TABLE torchrelay_rollouts (
	model TEXT NOT NULL, 
	document JSON NOT NULL, 
	PRIMARY KEY (model)
);
INSERT INTO "torchrelay_rollouts" VALUES('plain','{"plan": {"to": "2.0", "steps": [1.0, 100.0], "bake_s": 5.0, "guardrails": {"error_rate": 0.01, "p99": null, "non_finite": 0.0, "empty": 0.01, "out_of_memory": 0}, "min_calls": 50, "keep_warm_s": 600.0, "key": {"header": "x-user", "cookie": "", "json": ""}, "salt": ""}, "id": "r1", "model": "plain", "baseline": "1.0", "state": "running", "started_at": 1.0, "step": 1, "step_started_at": 2.0, "ended_at": 0.0, "workers_added": false, "previous_workers": null, "decisions": [{"time": 2.5, "verdict": "step", "percent": 5.0, "reason": "held for 60 s", "figures": {"baseline": {"calls": 10}}}]}');
CREATE TABLE torchrelay_schema (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT torchrelay_schema_pkc PRIMARY KEY (version_num)
);
INSERT INTO "torchrelay_schema" VALUES('schema_1');
CREATE TABLE torchrelay_shadow_mismatches (
	model TEXT NOT NULL, 
	version TEXT NOT NULL, 
	input TEXT NOT NULL, 
	distance FLOAT NOT NULL, 
	document BLOB NOT NULL, 
	PRIMARY KEY (model, version, input)
);
CREATE TABLE torchrelay_shadow_stats (
	model TEXT NOT NULL, 
	version TEXT NOT NULL, 
	document BLOB NOT NULL, 
	PRIMARY KEY (model, version)
);
CREATE TABLE torchrelay_versions (
	model TEXT NOT NULL, 
	version TEXT NOT NULL, 
	spec JSON NOT NULL, 
	config TEXT NOT NULL, 
	PRIMARY KEY (model, version), 
	FOREIGN KEY(model) REFERENCES torchrelay_models (name) ON DELETE CASCADE
);
INSERT INTO "torchrelay_versions" VALUES('clicks','1.0','{"url": "clicks.mar", "digest": "636c69636b73312e300000000000000000000000000000000000000000000000", "archive": "file:///archives/clicks-1.0.mar", "handler": "", "runtime": "python", "min_workers": 1, "max_workers": 1, "batch_size": 1, "max_batch_delay": null, "response_timeout": 120, "startup_timeout": 120, "max_retry_timeout": 300, "client_timeout": 0, "job_queue_size": 100, "device_type": "", "device_ids": [], "parallel_type": "", "parallel_level": 0, "continuous_batching": false, "sequence_batching": false, "sequence_max_idle": 0, "sequence_timeout": 0, "max_num_sequence": 0, "max_sequence_job_queue_size": 0, "use_venv": false, "requirements": "", "signed_by": "", "batcher": "torchrelay", "retries": true, "bucket_by_length": false, "use_job_ticket": false, "num_cpus": 0.0, "num_gpus": 0.0, "archive_bytes": 0, "memory": 0, "tensor_parallel": 1, "pipeline_parallel": 1, "placement_strategy": "STRICT_PACK", "max_ongoing_requests": 0, "max_concurrent_requests": 0, "fast_path": "torchserve", "routing": "load", "loaded_at_startup": false, "autoscaling": null, "adapters": [], "graph": null}','{}
');
INSERT INTO "torchrelay_versions" VALUES('clicks','2.0','{"url": "clicks.mar", "digest": "636c69636b73322e300000000000000000000000000000000000000000000000", "archive": "file:///archives/clicks-2.0.mar", "handler": "", "runtime": "python", "min_workers": 1, "max_workers": 1, "batch_size": 1, "max_batch_delay": null, "response_timeout": 120, "startup_timeout": 120, "max_retry_timeout": 300, "client_timeout": 0, "job_queue_size": 100, "device_type": "", "device_ids": [], "parallel_type": "", "parallel_level": 0, "continuous_batching": false, "sequence_batching": false, "sequence_max_idle": 0, "sequence_timeout": 0, "max_num_sequence": 0, "max_sequence_job_queue_size": 0, "use_venv": false, "requirements": "", "signed_by": "", "batcher": "torchrelay", "retries": true, "bucket_by_length": false, "use_job_ticket": false, "num_cpus": 0.0, "num_gpus": 0.0, "archive_bytes": 0, "memory": 0, "tensor_parallel": 1, "pipeline_parallel": 1, "placement_strategy": "STRICT_PACK", "max_ongoing_requests": 0, "max_concurrent_requests": 0, "fast_path": "torchserve", "routing": "load", "loaded_at_startup": false, "autoscaling": null, "adapters": [], "graph": null}','{}
');
INSERT INTO "torchrelay_versions" VALUES('digits','1.0','{"url": "digits.mar", "digest": "646967697473312e300000000000000000000000000000000000000000000000", "archive": "file:///archives/digits-1.0.mar", "handler": "", "runtime": "python", "min_workers": 1, "max_workers": 2, "batch_size": 8, "max_batch_delay": 50, "response_timeout": 120, "startup_timeout": 120, "max_retry_timeout": 300, "client_timeout": 0, "job_queue_size": 100, "device_type": "", "device_ids": [], "parallel_type": "", "parallel_level": 0, "continuous_batching": false, "sequence_batching": false, "sequence_max_idle": 0, "sequence_timeout": 0, "max_num_sequence": 0, "max_sequence_job_queue_size": 0, "use_venv": false, "requirements": "", "signed_by": "", "batcher": "torchrelay", "retries": true, "bucket_by_length": false, "use_job_ticket": false, "num_cpus": 0.0, "num_gpus": 0.0, "archive_bytes": 5000, "memory": 300000000, "tensor_parallel": 1, "pipeline_parallel": 1, "placement_strategy": "STRICT_PACK", "max_ongoing_requests": 0, "max_concurrent_requests": 0, "fast_path": "torchserve", "routing": "load", "loaded_at_startup": false, "autoscaling": {"policy": "requests", "target_ongoing_requests": null, "target_p95_ms": null, "upscale_delay_s": 3.0, "downscale_delay_s": 60.0, "downscale_to_zero_delay_s": 300.0, "look_back_period_s": 10.0}, "adapters": [], "graph": null}','batchSize: 8
handler:
  labels:
    0: zero
');
INSERT INTO "torchrelay_versions" VALUES('digits','2.0','{"url": "digits.mar", "digest": "646967697473322e300000000000000000000000000000000000000000000000", "archive": "file:///archives/digits-2.0.mar", "handler": "", "runtime": "python", "min_workers": 1, "max_workers": 1, "batch_size": 8, "max_batch_delay": 50, "response_timeout": 120, "startup_timeout": 120, "max_retry_timeout": 300, "client_timeout": 0, "job_queue_size": 100, "device_type": "", "device_ids": [], "parallel_type": "", "parallel_level": 0, "continuous_batching": false, "sequence_batching": false, "sequence_max_idle": 0, "sequence_timeout": 0, "max_num_sequence": 0, "max_sequence_job_queue_size": 0, "use_venv": false, "requirements": "", "signed_by": "", "batcher": "torchrelay", "retries": true, "bucket_by_length": false, "use_job_ticket": false, "num_cpus": 0.0, "num_gpus": 0.0, "archive_bytes": 5000, "memory": 300000000, "tensor_parallel": 1, "pipeline_parallel": 1, "placement_strategy": "STRICT_PACK", "max_ongoing_requests": 0, "max_concurrent_requests": 0, "fast_path": "torchserve", "routing": "load", "loaded_at_startup": false, "autoscaling": null, "adapters": [], "graph": null}','batchSize: 8
handler:
  labels:
    0: zero
');
INSERT INTO "torchrelay_versions" VALUES('digits','3.0','{"url": "digits.mar", "digest": "646967697473332e300000000000000000000000000000000000000000000000", "archive": "file:///archives/digits-3.0.mar", "handler": "", "runtime": "python", "min_workers": 1, "max_workers": 1, "batch_size": 8, "max_batch_delay": 50, "response_timeout": 120, "startup_timeout": 120, "max_retry_timeout": 300, "client_timeout": 0, "job_queue_size": 100, "device_type": "", "device_ids": [], "parallel_type": "", "parallel_level": 0, "continuous_batching": false, "sequence_batching": false, "sequence_max_idle": 0, "sequence_timeout": 0, "max_num_sequence": 0, "max_sequence_job_queue_size": 0, "use_venv": false, "requirements": "", "signed_by": "", "batcher": "torchrelay", "retries": true, "bucket_by_length": false, "use_job_ticket": false, "num_cpus": 0.0, "num_gpus": 0.0, "archive_bytes": 5000, "memory": 300000000, "tensor_parallel": 1, "pipeline_parallel": 1, "placement_strategy": "STRICT_PACK", "max_ongoing_requests": 0, "max_concurrent_requests": 0, "fast_path": "torchserve", "routing": "load", "loaded_at_startup": false, "autoscaling": null, "adapters": [], "graph": null}','batchSize: 8
handler:
  labels:
    0: zero
');
INSERT INTO "torchrelay_versions" VALUES('pipeline','1.0','{"url": "", "digest": "", "archive": "", "handler": "", "runtime": "python", "min_workers": 0, "max_workers": 0, "batch_size": 1, "max_batch_delay": null, "response_timeout": 120, "startup_timeout": 120, "max_retry_timeout": 300, "client_timeout": 0, "job_queue_size": 100, "device_type": "", "device_ids": [], "parallel_type": "", "parallel_level": 0, "continuous_batching": false, "sequence_batching": false, "sequence_max_idle": 0, "sequence_timeout": 0, "max_num_sequence": 0, "max_sequence_job_queue_size": 0, "use_venv": false, "requirements": "", "signed_by": "", "batcher": "torchrelay", "retries": true, "bucket_by_length": false, "use_job_ticket": false, "num_cpus": 0.0, "num_gpus": 0.0, "archive_bytes": 0, "memory": 0, "tensor_parallel": 1, "pipeline_parallel": 1, "placement_strategy": "STRICT_PACK", "max_ongoing_requests": 0, "max_concurrent_requests": 0, "fast_path": "torchserve", "routing": "load", "loaded_at_startup": false, "autoscaling": null, "adapters": [], "graph": {"steps": {"read": {"model": "digits", "function": "", "inputs": {"x": "request"}, "each": "", "parallel": 16, "retries": 0, "timeout_s": null}}, "name": "pipeline", "version": "1.0", "output": [], "timeout_s": null, "workers": 1, "owned": [], "torchserve": {}}}','{}
');
INSERT INTO "torchrelay_versions" VALUES('plain','1.0','{"url": "plain.mar", "digest": "706c61696e312e30000000000000000000000000000000000000000000000000", "archive": "file:///archives/plain-1.0.mar", "handler": "", "runtime": "python", "min_workers": 1, "max_workers": 1, "batch_size": 1, "max_batch_delay": null, "response_timeout": 120, "startup_timeout": 120, "max_retry_timeout": 300, "client_timeout": 0, "job_queue_size": 100, "device_type": "", "device_ids": [], "parallel_type": "", "parallel_level": 0, "continuous_batching": false, "sequence_batching": false, "sequence_max_idle": 0, "sequence_timeout": 0, "max_num_sequence": 0, "max_sequence_job_queue_size": 0, "use_venv": false, "requirements": "", "signed_by": "", "batcher": "torchrelay", "retries": true, "bucket_by_length": false, "use_job_ticket": false, "num_cpus": 0.0, "num_gpus": 0.0, "archive_bytes": 0, "memory": 0, "tensor_parallel": 1, "pipeline_parallel": 1, "placement_strategy": "STRICT_PACK", "max_ongoing_requests": 0, "max_concurrent_requests": 0, "fast_path": "torchserve", "routing": "load", "loaded_at_startup": false, "autoscaling": null, "adapters": [], "graph": null}','{}
');
INSERT INTO "torchrelay_versions" VALUES('plain','2.0','{"url": "plain.mar", "digest": "706c61696e322e30000000000000000000000000000000000000000000000000", "archive": "file:///archives/plain-2.0.mar", "handler": "", "runtime": "python", "min_workers": 1, "max_workers": 1, "batch_size": 1, "max_batch_delay": null, "response_timeout": 120, "startup_timeout": 120, "max_retry_timeout": 300, "client_timeout": 0, "job_queue_size": 100, "device_type": "", "device_ids": [], "parallel_type": "", "parallel_level": 0, "continuous_batching": false, "sequence_batching": false, "sequence_max_idle": 0, "sequence_timeout": 0, "max_num_sequence": 0, "max_sequence_job_queue_size": 0, "use_venv": false, "requirements": "", "signed_by": "", "batcher": "torchrelay", "retries": true, "bucket_by_length": false, "use_job_ticket": false, "num_cpus": 0.0, "num_gpus": 0.0, "archive_bytes": 0, "memory": 0, "tensor_parallel": 1, "pipeline_parallel": 1, "placement_strategy": "STRICT_PACK", "max_ongoing_requests": 0, "max_concurrent_requests": 0, "fast_path": "torchserve", "routing": "load", "loaded_at_startup": false, "autoscaling": null, "adapters": [], "graph": null}','{}
');
INSERT INTO "torchrelay_versions" VALUES('poet','1.0','{"url": "poet.mar", "digest": "706f6574312e3000000000000000000000000000000000000000000000000000", "archive": "file:///archives/poet-1.0.mar", "handler": "llm", "runtime": "python", "min_workers": 1, "max_workers": 1, "batch_size": 1, "max_batch_delay": null, "response_timeout": 120, "startup_timeout": 120, "max_retry_timeout": 300, "client_timeout": 0, "job_queue_size": 100, "device_type": "", "device_ids": [], "parallel_type": "", "parallel_level": 0, "continuous_batching": false, "sequence_batching": false, "sequence_max_idle": 0, "sequence_timeout": 0, "max_num_sequence": 0, "max_sequence_job_queue_size": 0, "use_venv": false, "requirements": "", "signed_by": "", "batcher": "torchrelay", "retries": true, "bucket_by_length": false, "use_job_ticket": false, "num_cpus": 0.0, "num_gpus": 0.5, "archive_bytes": 0, "memory": 0, "tensor_parallel": 1, "pipeline_parallel": 1, "placement_strategy": "STRICT_PACK", "max_ongoing_requests": 0, "max_concurrent_requests": 0, "fast_path": "torchserve", "routing": "prefix", "loaded_at_startup": false, "autoscaling": null, "adapters": [{"name": "formal", "url": "formal.zip", "digest": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "archive": "file:///archives/formal.zip"}], "graph": null}','engine:
  name: transformers
');
COMMIT;
