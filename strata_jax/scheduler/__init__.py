"""The policy core: pure functions from frozen views to frozen plans.

Standard library only: no JAX, no clock, no randomness, no I/O, no flags.

What the stages hold to; other comments here refer to these rules by number:

1. A claim is made when a request is chosen. Head, walk, bundle and refill each pass the deferral
   test with the claims as they stand then.
2. A delay hit is a run of spans that are in flight or claimed, longer than the threshold. The
   deferred wait at the front, and what they would hit stays, until they are considered once more.
3. A bundle hit is a request that shares what the batch loads and must load at most
   `bundle_slack_tokens` beyond that. Bundles skip the ratio test, never the capacity test.
4. Every node counts once: in loads, in pages, in the evictable room that it takes away.
5. The load ratio uses the tokens computed in this step (chunks). A step is full when its tokens,
   its requests or the slots of running requests are used up; pages are judged request by request.
6. Only prompt tokens are in flight. A chunk is published when it completes, that of a request
   which is aborted later too; what a parked request will compute stays in flight.
7. Load or compute is decided per node and step, not per request.
8. Whoever was deferred, postponed or bypassed up to a limit is urgent: first, in arrival order,
   never deferred or postponed; if it does not fit, nothing else is admitted until it does.
"""
