// What is shown: the newest status, drawn at most once per frame, and what may be asked of the daemon.
const EVENTS_MOST = 100;
const ring = new Ring(['power_w', 'p99_s', 'rate_per_s']);
const sparks = {
  power_w: new Spark(at('spark-power'), 'power_w', watts),
  p99_s: new Spark(at('spark-p99'), 'p99_s', seconds),
  rate_per_s: new Spark(at('spark-rate'), 'rate_per_s', rate),
};
const ladder = new LadderFigure(at('ladder'));
let shown = null, offered = '', turn = null, turnedAt = 0, due = false;

const feed = new Feed({
  status(status) {
    if (status.turn !== turn) { turn = status.turn; turnedAt = performance.now(); }
    shown = status;
    relative = status.energy_kind === 'relative';
    ring.push(Date.parse(status.at) / 1e3, status);
    redraw();
  },
  event(event) { log(event); },
  async began() {
    const [events, past] = await Promise.all([feed.ask('GET', '/v1/events?limit=100'), feed.ask('GET', '/v1/seconds')]);
    at('events').replaceChildren();
    feed.last = 0;
    for (const each of (events.events ?? []).slice(-EVENTS_MOST)) log(each);
    for (const each of past.seconds ?? []) ring.push(typeof each.t === 'number' ? each.t : Date.parse(each.t) / 1e3, each);
    offered = '';
  },
  changed() { liveness(); },
});

const redraw = () => {
  if (due) return;
  due = true;
  requestAnimationFrame(() => { due = false; if (shown) draw(shown); });
};
const log = (event) => {
  if (event.number <= feed.last) return;
  feed.last = event.number;
  const list = at('events'), line = made('li', { class: /^[a-z]+$/.test(event.kind) ? event.kind : 'other' });
  line.append(made('time', { datetime: event.at }, dayTime(event.at)), made('b', {}, event.kind), made('span', {}, event.words));
  list.prepend(line);
  while (list.children.length > EVENTS_MOST) list.lastElementChild.remove();
  hide('no-events', true);
};

const draw = (now) => {
  heading(now);
  figures(now);
  saved(now);
  ladder.draw(now);
  tables(now);
  steering(now);
  liveness();
};
const heading = (now) => {
  tell('version', now.polythrottle);
  tell('title', now.title || now.device || 'no device');
  const served = now.workload;
  tell('served', served ? `${served.name}, ${served.up ? 'up' : 'down'} · ${served.slo.join(', ') || 'no SLO'} · ${served.traffic}` : 'no workload');
  hide('phase', false);
  tell('phase', now.phase);
  classed(at('phase'), `pill ${/^[a-z]+$/.test(now.phase) ? now.phase : ''}`);
  hide('kind', !now.energy_kind || now.energy_kind === 'measured');
  tell('kind', `${now.energy_kind} energy`);
  for (const tag of document.querySelectorAll('.tag')) put(tag, now.energy_kind && now.energy_kind !== 'measured' ? now.energy_kind : '');
  tell('why', now.reason ? `${now.phase}: ${now.reason}` : '');
  tell('about', `${now.device} · daemon since ${dayTime(now.since)} · ${prefixed(now.resident_bytes, 'B')} of memory · control loop late by ${seconds(now.late_p99_s)} (p99) · ${joules(now.energy_j)} used${now.energy_kind ? `, ${now.energy_kind}` : ''}`);
};
const figures = (now) => {
  const limit = now.budget.limit_w, peak = known(now.peak_w) ? `peak ${watts(now.peak_w)}` : '';
  tell('power', watts(now.power_w));
  tell('power-note', [peak, known(limit) ? `budget ${watts(limit)}` : ''].filter(Boolean).join(' · '));
  over('power', known(limit) && now.power_w > limit);
  tell('p99', seconds(now.p99_s));
  const used = known(now.p99_s) && now.limit_s > 0 ? `, ${Math.round(100 * now.p99_s / now.limit_s)} % of it` : '';
  const first = known(now.ttft_p99_s) ? ` · first token ${seconds(now.ttft_p99_s)}` : '';
  const each = known(now.tpot_p99_s) ? ` · per token ${seconds(now.tpot_p99_s)}` : '';
  tell('p99-note', `${known(now.limit_s) ? `limit ${seconds(now.limit_s)}${used}` : `mean ${seconds(now.mean_s)} · no limit`}${first}${each}`);
  over('p99', known(now.limit_s) && now.p99_s > now.limit_s);
  tell('rate', rate(now.rate_per_s));
  const most = now.rung ? `serves up to ${rate(now.rung.rate_per_s)} · ` : '';
  const tokens = known(now.tokens_out_per_s) ? ` · ${Math.round(now.tokens_out_per_s).toLocaleString('en')} tokens/s` : '';
  tell('rate-note', `${most}${known(now.waiting) ? now.waiting : NONE} waiting${tokens}`);
  sparks.power_w.draw(ring, limit);
  sparks.p99_s.draw(ring, now.limit_s);
  sparks.rate_per_s.draw(ring, now.rung?.rate_per_s);
  document.title = `${watts(now.power_w)} · p99 ${seconds(now.p99_s)} · polythrottle`;
};
const over = (id, is) => { at(id).classList.toggle('over-limit', is); };
const saved = ({ saved: { joules: mid, low, high, requests, words } }) => {
  const ends = known(low) && known(high), proven = ends && (low > 0 || high < 0);
  tell('saved', !known(mid) ? 'unknown' : proven ? joules(mid) : 'not proven');
  classed(at('saved'), `value${proven ? (low > 0 ? ' proven' : ' over-limit') : ' word'}`);
  tell('saved-ends', !known(mid) ? '' : ends ? `95 % interval ${between(low, high)}` : `${joules(mid)}, interval not known`);
  hide('interval', !ends);
  if (ends) interval(mid, low, high, proven);
  const counted = requests ? `${requests.toLocaleString('en')} requests, ` : '';
  tell('saved-words', `${counted}${words}`);
};
const interval = (mid, low, high, proven) => {
  const from = Math.min(0, low), to = Math.max(0, high), share = (value) => 100 * (value - from) / (to - from || 1);
  const [, bar, tick, zero] = at('interval').children;
  bar.style.left = `${share(low)}%`;
  bar.style.width = `${Math.max(0.5, share(high) - share(low))}%`;
  tick.style.left = `${share(mid)}%`;
  zero.style.left = `${share(0)}%`;
  classed(at('interval'), proven ? 'interval' : 'interval unproven');
};
const GUARDS = { p99: seconds, 'ttft p99': seconds, 'tpot p99': seconds, errors: (value) => `${round(value * 100)} %`, power: watts, 'peak power': watts, temperature: degrees, throttling: (value) => (value ? 'yes' : 'no') };
const tables = (now) => {
  const set = Object.entries(now.point).map(([name, value]) => [knobName(name), level(name, value)]);
  if (set.length && now.gather_s > 0) set.push(['wait for a full batch', seconds(now.gather_s)]);
  rows(at('knobs'), set.length ? set : [['nothing is set', '']]);
  const runs = Object.entries(now.clocks_hz).map(([name, value]) => [name, megahertz(value)]);
  runs.push(['temperature', degrees(now.temperature_c)], ['throttled', now.throttled === null ? 'unknown' : now.throttled ? 'yes' : 'no']);
  rows(at('clocks'), runs);
  tell('boundary', now.boundary);
  const seen = (guard, value) => (known(value) ? (GUARDS[guard.name.split(' for ')[0]] ?? round)(value) : NONE);
  const stands = ({ tripped, value, limit }) => (tripped ? 'tripped' : !known(limit) ? 'no limit' : !known(value) ? 'unknown' : value > limit ? 'above' : 'ok');
  rows(at('guards'), now.guards.map((guard) => [guard.name, seen(guard, guard.value), seen(guard, guard.limit), stands(guard)]));
  now.guards.forEach((guard, index) => classed(at('guards').rows[index], guard.tripped ? 'trips' : ''));
  tell('drift', now.drift ? `Drift: ${now.drift}` : now.guards.length ? '' : 'No guard is set.');
  rows(at('rungs'), now.ladder.map((rung) => [rate(rung.rate_per_s), watts(rung.power_w), seconds(rung.p99_s), point(rung.point)]), false);
  [...at('rungs').rows].forEach((row, index) => { index === now.rung?.number ? row.setAttribute('aria-current', 'true') : row.removeAttribute('aria-current'); });
  hide('ladder-more', !now.ladder.length);
  const rung = now.rung;
  tell('ladder-note', rung ? `Set: point ${rung.number + 1} of ${rung.of}, for up to ${rate(rung.rate_per_s)}; predicted there: ${watts(rung.power_w)} and a p99 of ${seconds(rung.p99_s)}. Expected load: ${rate(now.demand_per_s)}.` : now.ladder.length ? 'None of these points is set now.' : 'No profile with points for different loads is followed.');
  const { words, limit_w: limit, left_j: left, shadow_w_per_ms: shadow, met } = now.budget;
  tell('budget', words || 'No limit is set.');
  rows(at('budget-rows'), [['allowed now', watts(limit)], ['left', known(left) ? `${fixed(left / 3600)} Wh` : NONE], ['one more ms of p99 saves', watts(shadow)], ['can be met', met === null ? 'unknown' : met ? 'yes' : 'no']].filter(() => words));
};
const steering = (now) => {
  const study = now.study, runs = study?.state === 'running', offer = `${study?.id} ${study?.state} ${now.workload?.profile}`;
  if (offered !== offer) { offered = offer; profiles().catch(() => {}); }  // a study that ended has written one
  tell('study', !study ? 'No study has run.' : `Study ${study.state}: ${study.trials} of at most ${study.of} trials${known(study.best_j) ? `, best ${joules(study.best_j)} ${now.energy_kind && now.energy_kind !== 'measured' ? `${now.energy_kind} ` : ''}per item` : ''}${study.words ? ` · ${study.words}` : ''}`);
  const { requests, late, late_left: more } = now.exploring ?? {};
  hide('exploring', !late);
  if (late) tell('exploring', `Late for studies: ${fixed(late)} of the last day’s ${fixed(requests)} requests; ${fixed(more)} more may be.`);
  hide('progress', !runs);
  const job = now.finetuning;
  hide('finetuning', !job);
  if (job) tell('finetuning', `Fine-tuning is ${job.state} since ${dayTime(job.since)}: ${job.epochs_done >= job.epochs ? `all ${job.epochs} epochs` : `epoch ${job.epochs_done + 1} of ${job.epochs}, ${job.samples.toLocaleString('en')}${known(job.samples_of) ? ` of ${job.samples_of.toLocaleString('en')}` : ''} samples of it`}${known(job.rate_per_s) ? ` at ${rate(job.rate_per_s)}` : ''} · ${job.folder}`);
  if (runs && study.of > 0) { at('progress').max = study.of; at('progress').value = study.trials; }
  hide('study-start', runs);
  hide('study-stop', !runs);
  at('trials').disabled = runs;
  const held = now.leased && now.phase !== 'yielded';
  hide('release', !held);
  hide('take', held);
  tell('profile-note', now.workload?.profile ? `Followed: ${now.workload.profile}` : 'No profile is followed.');
};

const notice = (key, words, bad, act) => {
  let node = at(`notice-${key}`);
  if (!words) { node?.remove(); return; }
  if (!node) {
    node = made('p', { id: `notice-${key}`, class: bad ? 'notice bad' : 'notice' });
    node.append(made('span'));
    if (act) {
      const button = made('button', { type: 'button' }, act[0]);
      button.addEventListener('click', act[1]);
      node.append(button);
    }
    at('notices').append(node);
  }
  put(node.firstElementChild, words);
};
const liveness = () => {
  const still_s = (performance.now() - turnedAt) / 1e3, stale = feed.live && turn !== null && still_s > STALE_S;
  const state = !feed.live ? (feed.asked ? 'locked' : feed.lostAt || turn === null ? 'lost' : 'connecting') : stale ? 'stale' : turn === null ? 'connecting' : 'fresh';
  const last = shown ? clockTime(shown.at) : '';
  classed(at('live'), `pill live ${state}`);
  put(at('live').lastElementChild, { fresh: `live ${last}`, stale: `old, ${last}`, lost: 'no answer', locked: 'token needed', connecting: 'connecting' }[state]);
  hide('login', state !== 'locked');
  tell('login-words', feed.words);
  at('main').classList.toggle('old', state !== 'fresh');
  const since = feed.lostAt ? ` since ${clockTime(feed.lostAt)}` : '';
  notice('lost', state === 'lost' ? `${feed.words ? `The daemon says: ${feed.words};` : `The daemon does not answer${since};`} trying again. ${last ? `What is below is of ${last}.` : feed.words ? '' : 'Is polythrottle daemon running?'}` : '', true);
  // Whole steps of five seconds: what is announced to a screen reader must not change each second.
  notice('stale', state === 'stale' ? `These figures are old: the daemon answers, but its control loop has not turned for over ${span(5 * Math.floor(still_s / 5))}.` : '', true);
  const fresh = state === 'fresh' || state === 'stale';
  for (const button of document.querySelectorAll('main button, #notices button')) button.disabled = !fresh;
  if (!shown) return;
  const left = shown.confirm_left_s;
  notice('keep', fresh && shown.unconfirmed ? `${shown.unconfirmed} is tried${known(left) ? ` and rolled back in ${span(Math.ceil(left / 10) * 10)} or less` : ''}, unless it is kept.` : '', false, ['Keep it', () => act('POST', '/v1/confirm', {})]);
  notice('reach', fresh && !shown.reachable ? 'The device does not answer.' : '', true);
  notice('budget', fresh && shown.budget.met === false ? `The budget cannot be met: ${shown.budget.words}` : '', true);
  notice('faults', shown.faults.length ? `Not working: ${shown.faults.join('; ')}` : '', true);
};

const say = (words, bad = false) => { tell('said', words); classed(at('said'), bad ? 'said bad' : 'said'); };
const act = async (method, path, body) => {
  try {
    say((await feed.ask(method, path, body)).words ?? 'done');
  } catch (error) {
    say(error instanceof Refusal ? error.message : 'The daemon does not answer.', true);
  }
};
const profiles = async () => {
  const { profiles: found = [] } = await feed.ask('GET', '/v1/profiles');
  const saving = (each) => (known(each.saving) ? `, saves ${Math.round(100 * each.saving)} %${each.energy_kind && each.energy_kind !== 'measured' ? ` ${each.energy_kind}` : ''}` : '');
  const named = (each) => (each.fault ? `${each.name}: ${each.fault}` : `${each.name} (${[each.slo ?? []].flat().join(', ')}${saving(each)})`);
  const chosen = at('profiles').value;
  at('profiles').replaceChildren(...found.map((each) => made('option', { value: each.name, ...(each.fault ? { disabled: '' } : {}) }, named(each))));
  if (found.some((each) => each.name === chosen)) at('profiles').value = chosen;
  if (!found.length) at('profiles').append(made('option', { value: '' }, 'no profile is tuned yet'));
};
const on = (id, kind, then) => at(id).addEventListener(kind, (event) => { event.preventDefault(); then(); });
on('study-form', 'submit', () => { if (shown?.study?.state !== 'running') act('POST', '/v1/studies', { trials: Number(at('trials').value) }); });
on('study-stop', 'click', () => act('DELETE', `/v1/studies/${encodeURIComponent(shown?.study?.id ?? '')}`));
on('apply-form', 'submit', () => { if (at('profiles').value) act('POST', '/v1/apply', { profile: at('profiles').value, within_s: 60 }); });
on('release', 'click', () => act('POST', '/v1/release', {}));
on('take', 'click', () => act('POST', '/v1/take', {}));
on('login', 'submit', () => { feed.login(at('token').value); at('token').value = ''; });
at('budget-kind').addEventListener('change', () => {
  const kind = at('budget-kind').value;
  hide('budget-much', kind === '');
  hide('budget-last', kind !== 'battery_wh');
  at('budget-value').required = kind !== '';
  at('budget-hours').required = kind === 'battery_wh';
});
on('budget-form', 'submit', () => {
  const kind = at('budget-kind').value, wished = kind ? { [kind]: Number(at('budget-value').value) } : {};
  if (kind === 'battery_wh') wished.last_s = 3600 * Number(at('budget-hours').value);
  act('PUT', '/v1/budget', wished);
});
setInterval(liveness, 1000);
feed.follow();
