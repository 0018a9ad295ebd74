-- The settings of kinds with their limits, gates, the keys of tasks, what tasks wait for, what they came from, and periodic
-- tasks. Each change of a kind, gate or drain counts up `kind_change`, by which the nodes see that they must read again.

ALTER TABLE leasekit.store ADD COLUMN kind_change bigint NOT NULL DEFAULT 0;
ALTER TABLE leasekit.store ADD COLUMN has_waits boolean NOT NULL DEFAULT false;  -- whether `wait` has ever had a row
ALTER TABLE leasekit.store ADD COLUMN has_routes boolean NOT NULL DEFAULT false;  -- whether any task required labels

CREATE TABLE leasekit.kind (
    name text COLLATE "C" NOT NULL PRIMARY KEY,
    settings bytea,                -- as JSON; null: the kind no longer has any
    changed_at double precision NOT NULL,
    changed_by text,
    change bigint NOT NULL,        -- what `kind_change` was when this was written
    declared bytea,                -- as JSON: what code has declared
    digests text,                  -- of what code has declared, the newest first
    declared_at double precision
);

CREATE TABLE leasekit.gate (
    scope text COLLATE "C" NOT NULL,   -- kind or collection
    name text COLLATE "C" NOT NULL,
    mode text NOT NULL,                -- pause, drop or open: then its tasks are put back
    until double precision,
    reason text,
    changed_at double precision NOT NULL,
    changed_by text,
    PRIMARY KEY (scope, name)
);

-- Workers that take no new tasks.
CREATE TABLE leasekit.drain (
    worker text COLLATE "C" NOT NULL PRIMARY KEY,
    at double precision NOT NULL,
    by text
);

-- Tasks of closed collections. `next_trigger_at` of such a task is in the year 9999.
CREATE TABLE leasekit.parked (
    collection text COLLATE "C" NOT NULL,
    due_at double precision NOT NULL,
    seq bigint NOT NULL,
    PRIMARY KEY (collection, due_at, seq)
);
CREATE INDEX ix_parked_seq ON leasekit.parked (seq);

-- Tasks with keys. While such a task waits, `next_trigger_at` of its `trigger` is in the year 9999, so that nodes of
-- version 1 leave it to the others.
CREATE TABLE leasekit.keyed (
    seq bigint NOT NULL PRIMARY KEY,
    kind text COLLATE "C" NOT NULL,
    priority integer NOT NULL,
    key text COLLATE "C" NOT NULL,
    due_at double precision,       -- null: the task does not wait in the queue of its key
    keeps_place boolean NOT NULL   -- until the task ends, no other one of its key starts: it waits beside the queue
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ix_keyed_queued ON leasekit.keyed (kind, priority, key, due_at, seq) WHERE due_at IS NOT NULL;
CREATE INDEX ix_keyed_places ON leasekit.keyed (kind, key) WHERE keeps_place;

-- The keys of each kind and priority that have waiting tasks, or have taken more tasks than others.
CREATE TABLE leasekit.share (
    kind text COLLATE "C" NOT NULL,
    priority integer NOT NULL,
    key text COLLATE "C" NOT NULL, -- empty: tasks without a key
    taken double precision NOT NULL,
    active boolean NOT NULL,       -- it has joined for its due tasks
    due_at double precision,       -- of its first task; null: it has none
    PRIMARY KEY (kind, priority, key)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ix_share_active ON leasekit.share (kind, priority, taken, key) WHERE active;
CREATE INDEX ix_share_joining ON leasekit.share (kind, priority, due_at) WHERE NOT active AND due_at IS NOT NULL;
CREATE INDEX ix_share_idle ON leasekit.share (kind, priority, taken) WHERE due_at IS NULL;

-- Token buckets of kinds with a rate, and of their keys. No bucket: it is full. The key is empty if the bucket is that
-- of a whole kind.
CREATE TABLE leasekit.bucket (
    kind text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    full_at double precision NOT NULL,
    PRIMARY KEY (kind, key)
);
CREATE INDEX ix_bucket_of_keys ON leasekit.bucket (kind, full_at) WHERE key <> '';

-- Live leases are counted by kind.
CREATE INDEX ix_trigger_running ON leasekit.trigger (kind) WHERE owner IS NOT NULL;

-- The tasks that run after others. The row goes when the awaited task has succeeded.
CREATE TABLE leasekit.wait (
    awaited text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    PRIMARY KEY (awaited, id)
);
CREATE INDEX ix_wait_id ON leasekit.wait (id);

-- Awaited tasks to be looked at: what waits for them may not know of their end, but for the first ones, up to `told`.
CREATE TABLE leasekit.wake (
    awaited text COLLATE "C" NOT NULL PRIMARY KEY,
    told text COLLATE "C" NOT NULL
);

-- The tasks that came from others.
CREATE TABLE leasekit.chain (
    seq bigint NOT NULL PRIMARY KEY,
    parent text COLLATE "C" NOT NULL,
    root text COLLATE "C" NOT NULL
);
CREATE INDEX ix_chain_root ON leasekit.chain (root, seq);

-- The tags of tasks.
CREATE TABLE leasekit.task_tag (
    tag text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    PRIMARY KEY (tag, seq)
);
CREATE INDEX ix_task_tag_seq ON leasekit.task_tag (seq);

-- The roots of the chains to which no task is added any longer.
CREATE TABLE leasekit.cancelled_chain (
    root text COLLATE "C" NOT NULL PRIMARY KEY,
    at double precision NOT NULL
);

-- The tasks that are dropped unless they have begun by `at`, which is `allowed` seconds after their due time.
CREATE TABLE leasekit.deadline (
    seq bigint NOT NULL PRIMARY KEY,
    allowed double precision NOT NULL,
    at double precision NOT NULL
);
CREATE INDEX ix_deadline_at ON leasekit.deadline (at);

-- The periodic tasks. Each write counts up `version`, and replaces the version that its writer has read.
CREATE TABLE leasekit.periodic (
    name text COLLATE "C" NOT NULL PRIMARY KEY,
    task bytea NOT NULL,               -- when it fires and what is scheduled, as JSON
    since double precision NOT NULL,   -- the instant of the last firing that was judged
    next_at double precision,
    is_paused boolean NOT NULL,
    last_id text,                      -- of the task of the last firing
    firings bytea NOT NULL,            -- what became of the latest ones, as JSON
    digests text,                      -- of what code has declared, the newest first
    declared_at double precision,      -- when the first of them was declared last
    changed_at double precision NOT NULL,
    changed_by text,
    version bigint NOT NULL
) WITH (fillfactor = 50);
CREATE INDEX ix_periodic_next_at ON leasekit.periodic (next_at) WHERE next_at IS NOT NULL;

-- What happened in each minute: each node has rows of its own, which it writes once.
CREATE TABLE leasekit.minute (
    at integer NOT NULL,               -- the minutes since the epoch
    kind text COLLATE "C" NOT NULL,
    node text COLLATE "C" NOT NULL,
    counts bytea NOT NULL,
    PRIMARY KEY (kind, at, node)
);
CREATE INDEX ix_minute_at ON leasekit.minute (at);

-- The access tokens, also those that are revoked.
CREATE TABLE leasekit.access_token (
    id text COLLATE "C" NOT NULL PRIMARY KEY,
    name text COLLATE "C" NOT NULL,
    digest bytea NOT NULL,             -- the SHA-256 of its secret
    former_digest bytea,               -- that of the secret before it, which is taken until `former_until`
    former_until double precision,
    scopes text NOT NULL,              -- with commas between them
    kinds text NOT NULL,               -- patterns, with / between them
    created_at double precision NOT NULL,
    created_by text NOT NULL,
    expires_at double precision,
    used_at double precision,          -- about
    rotated_at double precision,
    revoked_at double precision
) WITH (fillfactor = 50);

-- Sessions of the web console.
CREATE TABLE leasekit.console_session (
    digest bytea NOT NULL PRIMARY KEY, -- the SHA-256 of its cookie
    secret bytea NOT NULL,             -- that of the secret of an access token, with which it began
    until double precision NOT NULL
);

-- Acts of operators. Rows are added, and deleted after a long time; none is ever updated.
CREATE TABLE leasekit.audit (
    id text COLLATE "C" NOT NULL PRIMARY KEY,
    at double precision NOT NULL,
    by text NOT NULL,
    token_id text,
    worker text,
    act text NOT NULL,
    target text,
    fields text NOT NULL,              -- names, with commas between them
    changed bigint NOT NULL
);
CREATE INDEX ix_audit_at ON leasekit.audit (at);

-- Tasks that applications have put in with transactions of their own. Each becomes a task once that has committed.
CREATE TABLE leasekit.inbox (
    number bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    task text NOT NULL,            -- JSON, one task of POST /v1/tasks
    at timestamp with time zone NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    refused text                   -- why it cannot become a task
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ix_inbox_waiting ON leasekit.inbox (number) WHERE refused IS NULL;
