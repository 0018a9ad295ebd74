-- The first tables. The columns are those of `leasekit.server.store.schema`, which a test compares.
--
-- Texts sort by their bytes (collation "C"): the prefixes of kinds are ranges then, and comparisons cost less.
-- There are no foreign keys: each insert would lock a row of `task`, and rows are removed together anyway.

CREATE TABLE leasekit.store (
    id text NOT NULL PRIMARY KEY,
    correction double precision NOT NULL,  -- what the database's clock is ahead of the clock of leases, in seconds
    gained double precision NOT NULL       -- what the clock of due times is ahead of the clock of leases, in seconds
);
INSERT INTO leasekit.store VALUES (replace(gen_random_uuid()::text, '-', ''), 0, 0);

-- The servers, and processes that opened the database themselves. Each one writes its own row once a second.
CREATE TABLE leasekit.node (
    id text COLLATE "C" NOT NULL PRIMARY KEY,
    name text NOT NULL,
    version text NOT NULL,
    address text,                    -- where the node serves clients over HTTP
    wants_events boolean NOT NULL,   -- of the other nodes
    workers bytea,                   -- those that the node has heard of, as JSON
    started_at double precision NOT NULL,
    seen double precision NOT NULL,  -- by the clock of leases
    boot_id text NOT NULL,           -- the start of the machine from which `boot` counts
    boot double precision NOT NULL,  -- the moment of `seen`, by the machine's clock without steps
    has_left boolean NOT NULL
) WITH (fillfactor = 50);

-- How many tasks each node has added to, and taken from, each kind and status. The sum over all nodes is their number.
CREATE TABLE leasekit.task_count (
    node text COLLATE "C" NOT NULL,  -- empty: nodes that are gone
    kind text COLLATE "C" NOT NULL,
    status text COLLATE "C" NOT NULL,
    tasks bigint NOT NULL,
    PRIMARY KEY (node, kind, status)
) WITH (fillfactor = 50);

-- Each node takes a block of numbers at once.
CREATE SEQUENCE leasekit.task_seq AS bigint INCREMENT BY 10000;

CREATE TABLE leasekit.task (
    seq bigint NOT NULL PRIMARY KEY,
    id text COLLATE "C" NOT NULL CONSTRAINT uq_task_id UNIQUE,
    kind text COLLATE "C" NOT NULL,
    collection text COLLATE "C",
    priority integer NOT NULL,
    created_at double precision NOT NULL,
    at double precision NOT NULL,
    max_attempts integer,
    max_crashes integer NOT NULL,
    max_runtime double precision,
    enqueue_timeout double precision NOT NULL,
    retry bytea,
    expiry text,
    dedupe_key text COLLATE "C",
    traceparent text,
    digest bytea NOT NULL,
    payload bytea NOT NULL
);

-- A renewal changes no indexed column, and finds room in the page of its row: no index is written.
CREATE TABLE leasekit.trigger (
    seq bigint NOT NULL PRIMARY KEY,
    id text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,
    priority integer NOT NULL,
    claim_timeout double precision NOT NULL,
    heartbeat_timeout double precision NOT NULL,
    status text COLLATE "C" NOT NULL,
    fence bigint NOT NULL,
    attempt integer NOT NULL,
    crashes integer NOT NULL,
    failures integer NOT NULL,
    cancel_requested boolean NOT NULL,
    owner text COLLATE "C",
    token text COLLATE "C",
    next_trigger_at double precision,
    reason text,
    max_runtime double precision,
    run_until double precision,
    was_extended boolean NOT NULL,
    ended_at double precision,
    claimed_at double precision,
    started_at double precision,
    heartbeat_at double precision,
    lease_until double precision
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

CREATE INDEX ix_trigger_waiting ON leasekit.trigger (kind, priority, next_trigger_at, seq)
    WHERE owner IS NULL AND next_trigger_at IS NOT NULL;
CREATE INDEX ix_trigger_leased ON leasekit.trigger (next_trigger_at) WHERE owner IS NOT NULL;
CREATE INDEX ix_trigger_ended ON leasekit.trigger (ended_at, seq) WHERE ended_at IS NOT NULL;

CREATE TABLE leasekit.progress (
    seq bigint NOT NULL PRIMARY KEY,
    value bytea NOT NULL,
    fence bigint,
    number bigint,
    at double precision
);

CREATE TABLE leasekit.run (
    seq bigint NOT NULL,
    fence bigint NOT NULL,
    attempt integer NOT NULL,
    outcome text COLLATE "C" NOT NULL,
    at double precision NOT NULL,
    worker text COLLATE "C",
    claimed_at double precision,
    started_at double precision,
    heartbeat_at double precision,
    token text COLLATE "C" NOT NULL,
    digest bytea,
    result bytea,
    error bytea,
    PRIMARY KEY (seq, fence)
);

CREATE TABLE leasekit.claim (
    worker text COLLATE "C" NOT NULL,
    claim_id text COLLATE "C" NOT NULL,
    granted_at double precision NOT NULL,
    waited double precision NOT NULL,
    grants bytea NOT NULL,
    PRIMARY KEY (worker, claim_id)
);
CREATE INDEX ix_claim_granted_at ON leasekit.claim (granted_at);

CREATE TABLE leasekit.dedupe (
    kind text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    until double precision,
    PRIMARY KEY (kind, key)
);
