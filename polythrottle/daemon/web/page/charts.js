// Up to ten minutes of a few series in arrays of fixed size, and figures of a fixed number of nodes.
const SPAN_S = 600;
class Ring {
  constructor(names) {
    this.names = names;
    this.times = new Float64Array(SPAN_S).fill(NaN);
    this.series = Object.fromEntries(names.map((name) => [name, new Float64Array(SPAN_S).fill(NaN)]));
    this.newest = -Infinity;
  }
  push(time, values) {
    const second = Math.floor(time);
    if (!Number.isFinite(second) || second < this.newest) return;
    const slot = second % SPAN_S;
    this.times[slot] = second;
    for (const name of this.names) this.series[name][slot] = known(values[name]) ? values[name] : NaN;
    this.newest = second;
  }
  most(name) {
    let most = 0;
    for (let slot = 0; slot < SPAN_S; slot += 1) {
      if (this.times[slot] > this.newest - SPAN_S && this.series[name][slot] > most) most = this.series[name][slot];
    }
    return most;
  }
  span() {  // whole minutes that there is something of
    let oldest = this.newest;
    for (const second of this.times) if (second > this.newest - SPAN_S && second < oldest) oldest = second;
    return Math.min(SPAN_S, 60 * Math.max(1, Math.ceil((this.newest - oldest + 1) / 60)));
  }
  path(name, top, height, span) {  // lines are broken where seconds are missing: a gap is not a value
    let drawn = '', last = -Infinity;
    for (let back = span - 1; back >= 0; back -= 1) {
      const second = this.newest - back, slot = ((second % SPAN_S) + SPAN_S) % SPAN_S, value = this.series[name][slot];
      if (this.times[slot] !== second || Number.isNaN(value)) continue;
      const x = ((span - 1 - back) * (SPAN_S - 1) / (span - 1)).toFixed(1), y = (height * (1 - Math.min(1, value / top))).toFixed(1);
      drawn += second - last > 3 ? `M${x} ${y}h.01` : `L${x} ${y}`;
      last = second;
    }
    return drawn;
  }
}
const drawn = (name, attributes = {}, text = '') => {
  const node = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  return node;
};
const ceiling = (value) => {  // a round number just above
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.9999) * power;
};
class Spark {
  constructor(home, name, write) {
    Object.assign(this, { name, write });
    this.picture = drawn('svg', { viewBox: `0 0 ${SPAN_S} 100`, preserveAspectRatio: 'none', role: 'img' });
    this.trace = drawn('path', { class: 'trace' });
    this.limit = drawn('path', { class: 'limit' });
    this.picture.append(drawn('path', { class: 'floor', d: `M0 100H${SPAN_S}` }), this.trace, this.limit);
    this.top = made('span');
    this.begin = made('span');
    const foot = made('p', { 'aria-hidden': 'true' });
    foot.append(this.begin, this.top, made('span', {}, 'now'));
    home.append(this.picture, foot);
  }
  draw(ring, limit) {
    const span = ring.span(), most = ring.most(this.name), top = ceiling(Math.max(most, known(limit) ? limit : 0) * 1.08);
    this.trace.setAttribute('d', ring.path(this.name, top, 100, span));
    this.limit.setAttribute('d', known(limit) ? `M0 ${(100 * (1 - limit / top)).toFixed(1)}H${SPAN_S}` : '');
    put(this.begin, `${span / 60} min ago`);
    put(this.top, most > 0 ? `0 to ${this.write(top)}` : '');
    this.picture.setAttribute('aria-label', `Last ${span / 60} min, at most ${this.write(most)}`);
  }
}
const ticks = (top, most) => {
  const step = ceiling(top / most);
  return Array.from({ length: Math.floor(top / step + 1e-9) + 1 }, (_, index) => index * step);
};
class LadderFigure {  // watts and p99 of every rung against its rate; where the daemon stands, and what is seen now
  constructor(home) {
    this.home = home;
    this.key = '';
    this.status = null;
    new ResizeObserver(() => this.draw(this.status)).observe(home);
  }
  draw(status) {
    this.status = status;
    const width = Math.round(this.home.clientWidth);
    if (!status || !status.ladder.length || width < 50) { this.home.replaceChildren(); this.key = ''; return; }
    const most = Math.max(...status.ladder.map((rung) => rung.power_w), status.power_w ?? 0, status.budget.limit_w ?? 0);
    const slowest = Math.max(...status.ladder.map((rung) => rung.p99_s), status.limit_s ?? 0, status.p99_s ?? 0);
    const fastest = Math.max(...status.ladder.map((rung) => rung.rate_per_s), status.rate_per_s ?? 0);
    const scale = [fastest * 1.04, ceiling(most * 1.05), ceiling(slowest * 1.1)];
    const key = JSON.stringify([width, scale, status.ladder, status.limit_s, status.budget.limit_w, relative]);
    if (key !== this.key) { this.key = key; this.build(status, width, scale); }
    this.mark(status);
  }
  build(status, width, [right, top, slow]) {
    const height = width < 560 ? 292 : 344, left = 44, upper = [20, height - 124], lower = [height - 90, height - 34];
    this.x = (value) => left + (width - left - 12) * Math.min(1, value / right);
    this.y = (value) => upper[1] - (upper[1] - upper[0]) * Math.min(1, value / top);
    this.z = (value) => lower[1] - (lower[1] - lower[0]) * Math.min(1, value / slow);
    const svg = drawn('svg', { viewBox: `0 0 ${width} ${height}`, height, role: 'img' });
    const text = (x, y, words, anchor = 'start', kind = '') => drawn('text', { x, y, 'text-anchor': anchor, class: kind }, words);
    const across = (y, kind) => drawn('line', { x1: left, x2: width - 12, y1: y, y2: y, class: kind });
    for (const value of ticks(top, 4)) svg.append(across(this.y(value), value ? 'grid' : 'axis'), text(left - 6, this.y(value) + 4, round(value), 'end'));
    for (const value of ticks(slow, 2)) svg.append(across(this.z(value), value ? 'grid' : 'axis'), text(left - 6, this.z(value) + 4, round(value * 1e3), 'end'));
    for (const value of ticks(right, width < 420 ? 4 : 6)) svg.append(text(this.x(value), lower[1] + 16, round(value), 'middle'));
    svg.append(text(0, 10, relative ? 'power, relative' : 'power, W'), text(0, lower[0] - 12, 'p99, ms'), text(width - 12, height - 4, 'requests per second', 'end'));
    const limits = [[status.budget.limit_w, this.y, 'budget'], [status.limit_s, this.z, 'limit']];
    for (const [value, place, name] of limits) {
      if (known(value)) svg.append(across(place(value), 'limit'), text(left + 4, place(value) - 4, name, 'start', 'limit-name'));
    }
    this.rungs = [];
    for (const [field, place] of [['power_w', this.y], ['p99_s', this.z]]) {
      svg.append(drawn('polyline', { class: 'steps', points: status.ladder.map((rung) => `${this.x(rung.rate_per_s)},${place(rung[field])}`).join(' ') }));
      this.rungs.push(status.ladder.map((rung) => svg.appendChild(drawn('circle', { class: 'rung', r: 4, cx: this.x(rung.rate_per_s), cy: place(rung[field]) }))));
    }
    this.nowLine = svg.appendChild(drawn('line', { class: 'now-line', y1: upper[0], y2: lower[1] }));
    this.marks = [svg.appendChild(drawn('path', { class: 'now' })), svg.appendChild(drawn('path', { class: 'now' }))];
    this.nowName = svg.appendChild(drawn('text', { class: 'now-name' }));
    Object.assign(this, { svg, width });
    this.home.replaceChildren(svg);
  }
  mark(status) {
    const here = status.rung?.number;
    for (const circles of this.rungs) {
      circles.forEach((circle, index) => {
        classed(circle, index === here ? 'rung here' : 'rung');
        circle.setAttribute('r', index === here ? 6 : 4);
      });
    }
    const now = status.rate_per_s, places = [[status.power_w, this.y], [status.p99_s, this.z]];
    this.nowLine.setAttribute('visibility', known(now) ? 'visible' : 'hidden');
    if (known(now)) { this.nowLine.setAttribute('x1', this.x(now)); this.nowLine.setAttribute('x2', this.x(now)); }
    this.marks.forEach((mark, index) => {
      const [value, place] = places[index];
      mark.setAttribute('d', known(now) && known(value) ? `M${this.x(now)} ${place(value) - 6}l6 6-6 6-6-6z` : '');
    });
    const late = known(now) && this.x(now) > 175;
    this.nowName.setAttribute('x', known(now) ? this.x(now) + (late ? -10 : 10) : 0);
    this.nowName.setAttribute('y', 31);
    this.nowName.setAttribute('text-anchor', late ? 'end' : 'start');
    put(this.nowName, known(now) && known(status.power_w) ? `now ${rate(now)}, ${watts(status.power_w)}` : '');
    const stands = status.rung ? `Set is point ${here + 1}, for up to ${rate(status.rung.rate_per_s)}, where ${watts(status.rung.power_w)} and a p99 of ${seconds(status.rung.p99_s)} are predicted.` : 'None of them is set.';
    this.svg.setAttribute('aria-label', `Power and p99 against load at ${status.ladder.length} points. ${stands}`);
  }
}
