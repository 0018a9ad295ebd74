-- The tables of version 2 with tasks in each state, by pg_dump --inserts.
SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;
CREATE SCHEMA leasekit;
CREATE TABLE leasekit.bucket (
    kind text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    full_at double precision NOT NULL
);
CREATE TABLE leasekit.cancelled_chain (
    root text NOT NULL COLLATE pg_catalog."C",
    at double precision NOT NULL
);
CREATE TABLE leasekit.chain (
    seq bigint NOT NULL,
    parent text NOT NULL COLLATE pg_catalog."C",
    root text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE leasekit.claim (
    worker text NOT NULL COLLATE pg_catalog."C",
    claim_id text NOT NULL COLLATE pg_catalog."C",
    granted_at double precision NOT NULL,
    waited double precision NOT NULL,
    grants bytea NOT NULL
);
CREATE TABLE leasekit.deadline (
    seq bigint NOT NULL,
    allowed double precision NOT NULL,
    at double precision NOT NULL
);
CREATE TABLE leasekit.dedupe (
    kind text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    id text NOT NULL COLLATE pg_catalog."C",
    until double precision
);
CREATE TABLE leasekit.drain (
    worker text NOT NULL COLLATE pg_catalog."C",
    at double precision NOT NULL,
    by text
);
CREATE TABLE leasekit.gate (
    scope text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    mode text NOT NULL,
    until double precision,
    reason text,
    changed_at double precision NOT NULL,
    changed_by text
);
CREATE TABLE leasekit.kind (
    name text NOT NULL COLLATE pg_catalog."C",
    settings bytea,
    changed_at double precision NOT NULL,
    changed_by text,
    change bigint NOT NULL,
    declared bytea,
    digests text,
    declared_at double precision
);
CREATE TABLE leasekit.node (
    id text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL,
    version text NOT NULL,
    address text,
    wants_events boolean NOT NULL,
    workers bytea,
    started_at double precision NOT NULL,
    seen double precision NOT NULL,
    boot_id text NOT NULL,
    boot double precision NOT NULL,
    has_left boolean NOT NULL
)
WITH (fillfactor='50');
CREATE TABLE leasekit.keyed (
    seq bigint NOT NULL,
    kind text NOT NULL COLLATE pg_catalog."C",
    priority integer NOT NULL,
    key text NOT NULL COLLATE pg_catalog."C",
    due_at double precision,
    keeps_place boolean NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0');
CREATE TABLE leasekit.share (
    kind text NOT NULL COLLATE pg_catalog."C",
    priority integer NOT NULL,
    key text NOT NULL COLLATE pg_catalog."C",
    taken double precision NOT NULL,
    active boolean NOT NULL,
    due_at double precision
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0');
CREATE TABLE leasekit.parked (
    collection text NOT NULL COLLATE pg_catalog."C",
    due_at double precision NOT NULL,
    seq bigint NOT NULL
);
CREATE TABLE leasekit.progress (
    seq bigint NOT NULL,
    value bytea NOT NULL,
    fence bigint,
    number bigint,
    at double precision
);
CREATE TABLE leasekit.run (
    seq bigint NOT NULL,
    fence bigint NOT NULL,
    attempt integer NOT NULL,
    outcome text NOT NULL COLLATE pg_catalog."C",
    at double precision NOT NULL,
    worker text COLLATE pg_catalog."C",
    claimed_at double precision,
    started_at double precision,
    heartbeat_at double precision,
    token text NOT NULL COLLATE pg_catalog."C",
    digest bytea,
    result bytea,
    error bytea
);
CREATE TABLE leasekit.store (
    id text NOT NULL,
    correction double precision NOT NULL,
    gained double precision NOT NULL,
    kind_change bigint DEFAULT 0 NOT NULL,
    has_waits boolean DEFAULT false NOT NULL,
    has_routes boolean DEFAULT false NOT NULL
);
CREATE TABLE leasekit.task (
    seq bigint NOT NULL,
    id text NOT NULL COLLATE pg_catalog."C",
    kind text NOT NULL COLLATE pg_catalog."C",
    collection text COLLATE pg_catalog."C",
    priority integer NOT NULL,
    created_at double precision NOT NULL,
    at double precision NOT NULL,
    max_attempts integer,
    max_crashes integer NOT NULL,
    max_runtime double precision,
    enqueue_timeout double precision NOT NULL,
    retry bytea,
    expiry text,
    dedupe_key text COLLATE pg_catalog."C",
    traceparent text,
    digest bytea NOT NULL,
    payload bytea NOT NULL
);
CREATE TABLE leasekit.task_count (
    node text NOT NULL COLLATE pg_catalog."C",
    kind text NOT NULL COLLATE pg_catalog."C",
    status text NOT NULL COLLATE pg_catalog."C",
    tasks bigint NOT NULL
)
WITH (fillfactor='50');
CREATE SEQUENCE leasekit.task_seq
    START WITH 1
    INCREMENT BY 10000
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE TABLE leasekit.trigger (
    seq bigint NOT NULL,
    id text NOT NULL COLLATE pg_catalog."C",
    kind text NOT NULL COLLATE pg_catalog."C",
    priority integer NOT NULL,
    claim_timeout double precision NOT NULL,
    heartbeat_timeout double precision NOT NULL,
    status text NOT NULL COLLATE pg_catalog."C",
    fence bigint NOT NULL,
    attempt integer NOT NULL,
    crashes integer NOT NULL,
    failures integer NOT NULL,
    cancel_requested boolean NOT NULL,
    owner text COLLATE pg_catalog."C",
    token text COLLATE pg_catalog."C",
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
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0');
CREATE TABLE leasekit.version (
    number integer NOT NULL,
    made_at timestamp with time zone NOT NULL
);
CREATE TABLE leasekit.wait (
    awaited text NOT NULL COLLATE pg_catalog."C",
    id text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE leasekit.wake (
    awaited text NOT NULL COLLATE pg_catalog."C",
    told text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE leasekit.minute (
    at integer NOT NULL,
    kind text NOT NULL COLLATE pg_catalog."C",
    node text NOT NULL COLLATE pg_catalog."C",
    counts bytea NOT NULL
);
CREATE TABLE leasekit.inbox (
    number bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    task text NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    refused text
);
CREATE TABLE leasekit.periodic (
    name text NOT NULL COLLATE pg_catalog."C",
    task bytea NOT NULL,
    since double precision NOT NULL,
    next_at double precision,
    is_paused boolean NOT NULL,
    last_id text,
    firings bytea NOT NULL,
    digests text,
    declared_at double precision,
    changed_at double precision NOT NULL,
    changed_by text,
    version bigint NOT NULL
)
WITH (fillfactor='50');
CREATE TABLE leasekit.task_tag (
    tag text NOT NULL COLLATE pg_catalog."C",
    seq bigint NOT NULL
);
INSERT INTO leasekit.bucket VALUES ('waiting', '', 1795469460);
INSERT INTO leasekit.cancelled_chain VALUES ('dead', 1795469460);
INSERT INTO leasekit.chain VALUES (7, 'held', 'held');
INSERT INTO leasekit.claim VALUES ('one', 'first', 1795469459.503321, 0.0003762245178222656, '\x5b5b312c223565666433303361373132396132636339616636363133666635313766376430225d5d');
INSERT INTO leasekit.claim VALUES ('one', 'second', 1795469459.574233, 0.0004394054412841797, '\x5b5b322c223231666639653666323833356536316138383832373838376431383961363037225d5d');
INSERT INTO leasekit.claim VALUES ('one', 'third', 1795469459.59019, 0, '\x5b5b352c226465353962613631333130346433393234623365323033316338633633383061225d5d');
INSERT INTO leasekit.deadline VALUES (4, 60, 4102444860);
INSERT INTO leasekit.dedupe VALUES ('done', 'key', 'done', NULL);
INSERT INTO leasekit.drain VALUES ('two', 1795469460, 'one');
INSERT INTO leasekit.gate VALUES ('kind', 'later', 'pause', NULL, 'not yet', 1795469460, 'one');
INSERT INTO leasekit.kind VALUES ('waiting', '\x7b227072696f72697479223a302c226d61785f617474656d707473223a337d', 1795469460, 'one', 2, NULL, NULL, NULL);
INSERT INTO leasekit.kind VALUES ('gone', NULL, 1795469459, NULL, 1, NULL, NULL, NULL);
INSERT INTO leasekit.keyed VALUES (6, 'waiting', 2, 'tenant', 1795469459.472198, false);
INSERT INTO leasekit.share VALUES ('waiting', 2, 'tenant', 0, false, 1795469459.472198);
INSERT INTO leasekit.task VALUES (6, 'keyed', 'waiting', NULL, 2, 1795469459.472198, 1795469459.472198, 25, 5, NULL, 60, NULL, NULL, NULL, NULL, '\x941dffce4e4308ceb33e87326003257d', '\x6e756c6c');
INSERT INTO leasekit.trigger VALUES (6, 'keyed', 'waiting', 2, 300, 300, 'new', 0, 0, 0, 0, false, NULL, NULL, 253402260000, NULL, NULL, NULL, false, NULL, NULL, NULL, NULL, NULL);
INSERT INTO leasekit.node VALUES ('a8ef9576db294b7d8fe5b3db89ba3f24', 'vm:5437', '0.1.0', NULL, false, NULL, 1795469459.450569, 1795469459.450569, '5a8f742c-0d4f-4206-a332-8a97d9634bda monotonic 0 0 boottime 0 0', 16269.626206012, true);
INSERT INTO leasekit.minute VALUES (29924490, 'done', 'n', '\x5b312c315d');
INSERT INTO leasekit.periodic VALUES ('hourly', '\x7b226b696e64223a22706572696f646963222c226576657279223a333630307d', 1795467600, 1795471200, false, NULL, '\x5b5d', NULL, NULL, 1795469460, 'one', 1);
INSERT INTO leasekit.progress VALUES (1, '\x7b2270616765223a337d', 1, 0, 1795469459.542902);
INSERT INTO leasekit.run VALUES (2, 1, 1, 'success', 1795469459.583261, 'one', 1795469459.574233, NULL, NULL, '21ff9e6f2835e61a88827887d189a607', '\x09b24a7f375e5cc5a155aa0660a68cae', '\x5b312c6e756c6c2c2278225d', NULL);
INSERT INTO leasekit.run VALUES (5, 1, 1, 'retry', 1795469459.596047, 'one', 1795469459.59019, NULL, NULL, 'de59ba613104d3924b3e2031c8c6380a', '\xf8b5afba478b554bfa8700daaeb4d319', NULL, '\x2262726f6b656e22');
INSERT INTO leasekit.store VALUES ('b3535224866ddc02208f37f142e2ed7b', 0, 0, 3, true, false);
INSERT INTO leasekit.task VALUES (5, 'dead', 'dead', NULL, 2, 1795469459.472198, 1795469459.472198, 1, 5, NULL, 60, NULL, NULL, NULL, NULL, '\x941dffce4e4308ceb33e87326003257d', '\x6e756c6c');
INSERT INTO leasekit.task VALUES (2, 'done', 'done', NULL, 2, 1795469459.472198, 1795469459.472198, 25, 5, NULL, 60, NULL, NULL, 'key', NULL, '\xb930b39012506bd7fb5f26c589473519', '\x22c3a95c5c22');
INSERT INTO leasekit.task VALUES (1, 'held', 'held', 'c', 2, 1795469459.472198, 1795469459.472198, 25, 5, NULL, 60, NULL, NULL, NULL, NULL, '\x984530e49acf879ea2a3b7c3062fca65', '\x7b226e223a317d');
INSERT INTO leasekit.task VALUES (4, 'later', 'later', NULL, 2, 1795469459.472198, 4102444800, 25, 5, NULL, 60, NULL, NULL, NULL, NULL, '\x941dffce4e4308ceb33e87326003257d', '\x6e756c6c');
INSERT INTO leasekit.task VALUES (7, 'next', 'next', NULL, 2, 1795469459.472198, 1795469459.472198, 25, 5, NULL, 60, NULL, NULL, NULL, NULL, '\x941dffce4e4308ceb33e87326003257d', '\x6e756c6c');
INSERT INTO leasekit.task VALUES (3, 'waiting', 'waiting', NULL, 1, 1795469459.472198, 1795469459.472198, 25, 5, NULL, 60, NULL, NULL, NULL, NULL, '\x941dffce4e4308ceb33e87326003257d', '\x6e756c6c');
INSERT INTO leasekit.task_tag VALUES ('blue', 2);
INSERT INTO leasekit.task_count VALUES ('a8ef9576db294b7d8fe5b3db89ba3f24', 'later', 'new', 1);
INSERT INTO leasekit.task_count VALUES ('a8ef9576db294b7d8fe5b3db89ba3f24', 'waiting', 'new', 2);
INSERT INTO leasekit.task_count VALUES ('a8ef9576db294b7d8fe5b3db89ba3f24', 'next', 'new', 1);
INSERT INTO leasekit.task_count VALUES ('a8ef9576db294b7d8fe5b3db89ba3f24', 'held', 'new', 0);
INSERT INTO leasekit.task_count VALUES ('a8ef9576db294b7d8fe5b3db89ba3f24', 'held', 'claimed', 0);
INSERT INTO leasekit.task_count VALUES ('a8ef9576db294b7d8fe5b3db89ba3f24', 'held', 'processing', 1);
INSERT INTO leasekit.task_count VALUES ('a8ef9576db294b7d8fe5b3db89ba3f24', 'done', 'new', 0);
INSERT INTO leasekit.task_count VALUES ('a8ef9576db294b7d8fe5b3db89ba3f24', 'done', 'claimed', 0);
INSERT INTO leasekit.task_count VALUES ('a8ef9576db294b7d8fe5b3db89ba3f24', 'done', 'success', 1);
INSERT INTO leasekit.task_count VALUES ('a8ef9576db294b7d8fe5b3db89ba3f24', 'dead', 'new', 0);
INSERT INTO leasekit.task_count VALUES ('a8ef9576db294b7d8fe5b3db89ba3f24', 'dead', 'claimed', 0);
INSERT INTO leasekit.task_count VALUES ('a8ef9576db294b7d8fe5b3db89ba3f24', 'dead', 'dead', 1);
INSERT INTO leasekit.trigger VALUES (3, 'waiting', 'waiting', 1, 300, 300, 'new', 0, 0, 0, 0, false, NULL, NULL, 1795469459.472198, NULL, NULL, NULL, false, NULL, NULL, NULL, NULL, NULL);
INSERT INTO leasekit.trigger VALUES (4, 'later', 'later', 2, 300, 300, 'new', 0, 0, 0, 0, false, NULL, NULL, 4102444800, NULL, NULL, NULL, false, NULL, NULL, NULL, NULL, NULL);
INSERT INTO leasekit.trigger VALUES (7, 'next', 'next', 2, 300, 300, 'new', 0, 0, 0, 0, false, NULL, NULL, 253402255000, NULL, NULL, NULL, false, NULL, NULL, NULL, NULL, NULL);
INSERT INTO leasekit.trigger VALUES (1, 'held', 'held', 2, 30, 30, 'processing', 1, 1, 0, 0, false, 'one', '5efd303a7129a2cc9af6613ff517f7d0', 1795469489.503321, NULL, NULL, NULL, false, NULL, 1795469459.503321, 1795469459.542902, 1795469459.542902, 1795469489.542902);
INSERT INTO leasekit.trigger VALUES (2, 'done', 'done', 2, 300, 300, 'success', 1, 1, 0, 0, false, NULL, NULL, NULL, NULL, NULL, NULL, false, 1795469459.583261, 1795469459.574233, NULL, NULL, NULL);
INSERT INTO leasekit.trigger VALUES (5, 'dead', 'dead', 2, 300, 300, 'dead', 1, 1, 0, 1, false, NULL, NULL, NULL, '1 attempt ended in retry: max_attempts is 1', NULL, NULL, false, 1795469459.596047, 1795469459.59019, NULL, NULL, NULL);
CREATE TABLE leasekit.access_token (
    id text COLLATE pg_catalog."C" NOT NULL,
    name text COLLATE pg_catalog."C" NOT NULL,
    digest bytea NOT NULL,
    former_digest bytea,
    former_until double precision,
    scopes text NOT NULL,
    kinds text NOT NULL,
    created_at double precision NOT NULL,
    created_by text NOT NULL,
    expires_at double precision,
    used_at double precision,
    rotated_at double precision,
    revoked_at double precision
)
WITH (fillfactor='50');
CREATE TABLE leasekit.console_session (
    digest bytea NOT NULL,
    secret bytea NOT NULL,
    until double precision NOT NULL
);
CREATE TABLE leasekit.audit (
    id text COLLATE pg_catalog."C" NOT NULL,
    at double precision NOT NULL,
    by text NOT NULL,
    token_id text,
    worker text,
    act text NOT NULL,
    target text,
    fields text NOT NULL,
    changed bigint NOT NULL
);
INSERT INTO leasekit.access_token VALUES ('t1', 'workers', '\x2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824', NULL, NULL, 'work,read', 'waiting/later*', 1795469460, 'local', NULL, NULL, NULL, NULL);
INSERT INTO leasekit.audit VALUES ('019a0000-0000-7000-8000-000000000001', 1795469460, 'local', NULL, 'one', 'token.create', 'workers', 'scopes,kinds', 1);
INSERT INTO leasekit.version VALUES (1, '2026-11-23 21:30:57.077121+00');
INSERT INTO leasekit.version VALUES (2, '2026-11-24 00:19:01.828552+00');
INSERT INTO leasekit.wait VALUES ('held', 'next');
SELECT pg_catalog.setval('leasekit.task_seq', 1, true);
ALTER TABLE ONLY leasekit.access_token
    ADD CONSTRAINT access_token_pkey PRIMARY KEY (id);
ALTER TABLE ONLY leasekit.console_session
    ADD CONSTRAINT console_session_pkey PRIMARY KEY (digest);
ALTER TABLE ONLY leasekit.audit
    ADD CONSTRAINT audit_pkey PRIMARY KEY (id);
ALTER TABLE ONLY leasekit.bucket
    ADD CONSTRAINT bucket_pkey PRIMARY KEY (kind, key);
ALTER TABLE ONLY leasekit.cancelled_chain
    ADD CONSTRAINT cancelled_chain_pkey PRIMARY KEY (root);
ALTER TABLE ONLY leasekit.deadline
    ADD CONSTRAINT deadline_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY leasekit.chain
    ADD CONSTRAINT chain_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY leasekit.claim
    ADD CONSTRAINT claim_pkey PRIMARY KEY (worker, claim_id);
ALTER TABLE ONLY leasekit.dedupe
    ADD CONSTRAINT dedupe_pkey PRIMARY KEY (kind, key);
ALTER TABLE ONLY leasekit.drain
    ADD CONSTRAINT drain_pkey PRIMARY KEY (worker);
ALTER TABLE ONLY leasekit.gate
    ADD CONSTRAINT gate_pkey PRIMARY KEY (scope, name);
ALTER TABLE ONLY leasekit.kind
    ADD CONSTRAINT kind_pkey PRIMARY KEY (name);
ALTER TABLE ONLY leasekit.keyed
    ADD CONSTRAINT keyed_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY leasekit.share
    ADD CONSTRAINT share_pkey PRIMARY KEY (kind, priority, key);
ALTER TABLE ONLY leasekit.node
    ADD CONSTRAINT node_pkey PRIMARY KEY (id);
ALTER TABLE ONLY leasekit.parked
    ADD CONSTRAINT parked_pkey PRIMARY KEY (collection, due_at, seq);
ALTER TABLE ONLY leasekit.minute
    ADD CONSTRAINT minute_pkey PRIMARY KEY (kind, at, node);
ALTER TABLE ONLY leasekit.periodic
    ADD CONSTRAINT periodic_pkey PRIMARY KEY (name);
ALTER TABLE ONLY leasekit.progress
    ADD CONSTRAINT progress_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY leasekit.run
    ADD CONSTRAINT run_pkey PRIMARY KEY (seq, fence);
ALTER TABLE ONLY leasekit.store
    ADD CONSTRAINT store_pkey PRIMARY KEY (id);
ALTER TABLE ONLY leasekit.task_count
    ADD CONSTRAINT task_count_pkey PRIMARY KEY (node, kind, status);
ALTER TABLE ONLY leasekit.task
    ADD CONSTRAINT task_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY leasekit.task_tag
    ADD CONSTRAINT task_tag_pkey PRIMARY KEY (tag, seq);
ALTER TABLE ONLY leasekit.trigger
    ADD CONSTRAINT trigger_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY leasekit.task
    ADD CONSTRAINT uq_task_id UNIQUE (id);
ALTER TABLE ONLY leasekit.version
    ADD CONSTRAINT version_pkey PRIMARY KEY (number);
ALTER TABLE ONLY leasekit.wait
    ADD CONSTRAINT wait_pkey PRIMARY KEY (awaited, id);
ALTER TABLE ONLY leasekit.wake
    ADD CONSTRAINT wake_pkey PRIMARY KEY (awaited);
CREATE INDEX ix_audit_at ON leasekit.audit USING btree (at);
CREATE INDEX ix_deadline_at ON leasekit.deadline USING btree (at);
CREATE INDEX ix_task_tag_seq ON leasekit.task_tag USING btree (seq);
CREATE INDEX ix_chain_root ON leasekit.chain USING btree (root, seq);
CREATE INDEX ix_claim_granted_at ON leasekit.claim USING btree (granted_at);
CREATE INDEX ix_inbox_waiting ON leasekit.inbox USING btree (number) WHERE (refused IS NULL);
CREATE INDEX ix_keyed_places ON leasekit.keyed USING btree (kind, key) WHERE keeps_place;
CREATE INDEX ix_keyed_queued ON leasekit.keyed USING btree (kind, priority, key, due_at, seq) WHERE (due_at IS NOT NULL);
CREATE INDEX ix_minute_at ON leasekit.minute USING btree (at);
CREATE INDEX ix_periodic_next_at ON leasekit.periodic USING btree (next_at) WHERE (next_at IS NOT NULL);
CREATE INDEX ix_share_active ON leasekit.share USING btree (kind, priority, taken, key) WHERE active;
CREATE INDEX ix_share_idle ON leasekit.share USING btree (kind, priority, taken) WHERE (due_at IS NULL);
CREATE INDEX ix_share_joining ON leasekit.share USING btree (kind, priority, due_at) WHERE ((NOT active) AND (due_at IS NOT NULL));
CREATE INDEX ix_parked_seq ON leasekit.parked USING btree (seq);
CREATE INDEX ix_trigger_ended ON leasekit.trigger USING btree (ended_at, seq) WHERE (ended_at IS NOT NULL);
CREATE INDEX ix_trigger_leased ON leasekit.trigger USING btree (next_trigger_at) WHERE (owner IS NOT NULL);
CREATE INDEX ix_trigger_running ON leasekit.trigger USING btree (kind) WHERE (owner IS NOT NULL);
CREATE INDEX ix_trigger_waiting ON leasekit.trigger USING btree (kind, priority, next_trigger_at, seq) WHERE ((owner IS NULL) AND (next_trigger_at IS NOT NULL));
CREATE INDEX ix_wait_id ON leasekit.wait USING btree (id);
