"""Mutants of connections: origins, hosts, proxies, TLS, and what is kept of requests that arrive."""

from collections.abc import Mapping

from harness.simulation.mutants.mutant import Mutant, tested

CONNECTIONS: Mapping[str, Mutant] = tested(
    "a history has no connections",
    """
foreign-origins: A web page of another origin may send requests.
server.http.reach:Reach.check
- not all(self.is_own_origin(request, origin) for origin in request.headers.getlist("origin"))
+ False
tests/server/console/test_site.py::test_a_foreign_host_or_origin_is_refused

plain-origins: A page that came without TLS has a form behind a proxy that has TLS.
server.http.reach:Reach.is_own_origin
- scheme != "https" or not self._is_trusted(request)
+ False
tests/server/http/test_http_tls.py::test_behind_a_proxy_the_origin_is_that_of_its_https_whatever_host_it_sends

plain-pages: A page that came without TLS has a form where the server has TLS.
server.http.reach:Reach.is_own_origin
- request.scope.get("scheme") == "https" and scheme != "https"
+ False
tests/server/http/test_http_tls.py::test_a_page_without_tls_has_no_forms_where_the_server_has_tls[https-False]

forwarded-origins: What a proxy sends on as its host is a name of the server, whatever it is.
server.http.reach:Reach.is_own_origin
- _without_port(forwarded).lower() in self.names
+ True
tests/server/http/test_http_tls.py::test_behind_a_proxy_the_origin_is_that_of_its_https_whatever_host_it_sends

rewritten-hosts: Forms are refused where the proxy sends a Host header of its own.
server.http.reach:Reach.is_own_origin
- hosts += self.names
+ pass
tests/server/console/test_behind_proxy.py::test_forms_work_behind_a_proxy_and_those_of_other_origins_are_refused[False]

foreign-hosts: A name that resolves to this machine is one of the server.
server.http.reach:Reach._is_name
- host.lower().rstrip(".") in self.names or ...
+ True
tests/server/http/test_http_tls.py::test_the_host_header_names_the_server_also_with_tls_and_tokens

first-line-believed: What a client has put before the line of a proxy counts as its address.
server.http.reach:Reach.peer
- ",".join(request.headers.getlist("x-forwarded-for"))
+ request.headers.get("x-forwarded-for", "")
tests/server/http/test_http_tls.py::test_the_client_of_a_request_is_what_a_known_proxy_says

ports-counted: Each port of an address is a client of its own.
server.http.reach:_forwarded
- (part, _without_port(part))
+ (part,)
tests/server/http/test_http_tls.py::test_the_address_of_a_client_has_no_port_and_what_is_none_counts_as_the_proxy[1.2.3.4:5678-1.2.3.4]

trailers-believed: What stands behind a body is a header.
server.http.protocol:BoundedProtocol.on_header
- self._timer is None
+ False
tests/server/http/test_http_connections.py::test_what_stands_behind_a_chunked_body_is_no_header[sqlite-origin: http://evil]

pipelined-parsed: Requests behind one without an answer are parsed at once.
server.http.protocol:_Flow.resume_reading
- not self._connection.pipeline
+ True
tests/server/http/test_http_connections.py::test_what_comes_behind_a_request_without_an_answer_waits_unparsed[sqlite]

pipelined-without-room: What waits behind requests fills the memory.
server.http.protocol:BoundedProtocol._keep
- _heads.is_reached(self._peer, HEADS)
+ False
tests/server/http/test_http_connections.py::test_what_comes_behind_requests_has_the_room_of_heads[sqlite]

waiting-head-late: A head counts as late while the server does not parse it.
server.http.protocol:BoundedProtocol._end_head
- self.flow.read_paused
+ False
tests/server/http/test_http_connections.py::test_a_head_that_waits_to_be_parsed_is_not_late[sqlite]

anothers-refusal: A request that may be applied is answered with the refusal of what comes behind it.
server.http.protocol:BoundedProtocol._refuse
- waiting[:-1] if self._has_body else waiting
+ []
tests/server/http/test_http_connections.py::test_what_comes_behind_requests_has_the_room_of_heads[sqlite]

left-unnoticed: A client that has gone waits for its claim as long as requests wait behind that.
server.http.protocol:BoundedProtocol._disconnect
- self._cycles
+ ()
tests/server/http/test_http_connections.py::test_a_client_that_went_away_with_requests_behind_its_claim_is_granted_nothing[sqlite]

tiny-refused: Large bodies keep out heartbeats.
server.http.bodies:Bodies.arriving
- size + more > _TINY
+ True
tests/server/http/test_http_connections.py::test_small_bodies_on_their_way_have_a_room_of_their_own[sqlite]

body-kept: A refused body stays in memory up to a garbage collection.
server.daemon_threads:_run
- del future, call
+ pass
tests/server/http/test_garbage.py::test_a_body_is_not_kept[sqlite-too deep]

body-of-another: What comes behind a request that offers another protocol is of its body.
server.http.protocol:_Body.on_body
- not self._is_over
+ True
tests/server/http/test_http_connections.py::test_what_comes_behind_an_offer_is_not_of_its_body[sqlite]

stop-held-up: A client with TLS that is idle holds up the stop of the server.
server.http.process:Server._cut_closed
- connection.transport.abort()
+ pass
tests/server/http/test_http_tls.py::test_an_idle_client_holds_up_no_stop

fields-without-end: A head has any number of fields.
server.http.protocol:BoundedProtocol.on_header
- len(self.headers) > MAX_FIELDS
+ False
tests/server/http/test_http_connections.py::test_a_head_has_a_hundred_fields[sqlite]

queries-without-end: A query has any number of fields.
server.http.protocol:BoundedProtocol.on_url
- self.url.count(b"&") >= MAX_FIELDS
+ False
tests/server/http/test_http_connections.py::test_a_path_with_its_query_has_a_bound[sqlite-101 fields]

trailers-without-end: What stands behind a body has no end.
server.http.protocol:BoundedProtocol._count_around
- self._around > MAX_HEAD
+ False
tests/server/http/test_http_connections.py::test_what_stands_behind_a_chunked_body_is_bounded[sqlite-one field]

heads-without-room: The heads of many connections fill the memory.
server.http.protocol:BoundedProtocol._count
- _heads.is_reached(self._peer, HEADS)
+ False
tests/server/http/test_http_connections.py::test_the_heads_on_their_way_have_a_room_together[sqlite]

bodies-decoded-together: Bodies that arrive together are decoded together, and all else waits.
server.http.bodies:Bodies.decoded
- await self.turn(size)
+ pass
tests/server/http/test_http_connections.py::test_a_body_that_has_arrived_waits_for_its_turn_and_a_tiny_one_does_not[sqlite]

bodies-in-one-turn: All bodies that have arrived are decoded in one turn of the event loop.
server.http.bodies:Bodies._wake
- room > 0
+ True
tests/server/http/test_bodies.py::test_the_event_loop_sees_to_everything_else_between_bodies

no-rest-after-bodies: Bodies that are dear to decode keep the interpreter lock from all else.
server.http.bodies:Bodies._end
- _REST * sum(taken)
+ 0
tests/server/http/test_bodies.py::test_after_a_long_body_the_thread_rests_for_as_long_as_it_has_taken

long-bodies-together: Long bodies of one caller go before those of others.
server.http.bodies:Bodies._begin
- self._is_busy or not self._long
+ not self._long
tests/server/http/test_bodies.py::test_callers_take_turns_with_long_bodies_too

turn-of-who-left: A body whose request was given up holds up all others.
server.http.bodies:Bodies._wake
- resolve(turn.has_come, None)
+ turn.has_come.set_result(None)
tests/server/http/test_bodies.py::test_whoever_leaves_holds_up_nobody

accepted-one-by-one: The event loop accepts one connection in a turn.
server.http.process:_copies
- _ACCEPTS - 1
+ 0
tests/server/http/test_http_connections.py::test_connections_that_come_together_are_accepted_in_a_few_turns_of_the_loop[sqlite]

bodies-without-room: The bodies of many requests fill the memory.
server.http.bodies:Bodies.arriving
- room.is_reached(caller, _TOGETHER)
+ False
tests/server/http/test_http_connections.py::test_small_bodies_on_their_way_have_a_room_of_their_own[sqlite]

around-the-proxy: Requests go around the proxy that has TLS.
server.http.reach:Reach.check
- self.proxies and not is_probe and not self._is_trusted(request)
+ False
tests/server/http/test_http_tls.py::test_a_server_behind_a_proxy_is_reached_through_it_alone

cookie-in-the-clear: The cookie of the console is sent in the clear behind a proxy.
server.console.sessions:Sessions.begin
- not self._has_proxy and _is_plain_loopback(request)
+ _is_plain_loopback(request)
tests/server/console/test_login.py::test_the_cookie_is_for_tls_only_behind_a_proxy_that_is_known_and_says_nothing

certificates-unread: A client trusts whoever answers.
leasekit_http.way:Way._tls
- tls.minimum_version = ssl.TLSVersion.TLSv1_2
+ tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
tests/adapters/http/test_way.py::test_a_certificate_that_is_not_trusted_is_said_at_once_with_what_to_do

hosts-unread: A client trusts a certificate for another host.
leasekit_http.way:Way._tls
- tls.minimum_version = ssl.TLSVersion.TLSv1_2
+ tls.check_hostname = False
tests/adapters/http/test_way.py::test_a_certificate_for_another_host_is_said_at_once

redirects-followed: A client follows a redirect, with its token.
leasekit_http.way:Way.client
- return httpx.AsyncClient(...)
+ return httpx.AsyncClient(timeout=httpx.Timeout(None), follow_redirects=True)
tests/adapters/http/test_way.py::test_no_redirect_is_followed_with_a_token
""",
)
