// From Prometheus text to what the page shows. No page, no network: the tests run this file alone.
"use strict";

// Return every series: name -> [{labels, value}].
function parseMetrics(text) {
  const families = {};
  for (const line of text.split("\n")) {
    const match = /^(dspark_\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    (families[match[1]] ||= []).push({ labels, value: Number(match[3]) });
  }
  return families;
}

function total(families, name, wanted = {}) {
  let sum = 0;
  for (const { labels, value } of families[name] || []) {
    if (Object.entries(wanted).every(([key, one]) => labels[key] === one)) sum += value;
  }
  return sum;
}

// Values of one label, in the order of numbers where they are numbers.
function labelValues(families, name, label) {
  const values = [...new Set((families[name] || []).map((one) => one.labels[label]))];
  return values.sort((a, b) => Number(a) - Number(b) || String(a).localeCompare(String(b)));
}

// Quantile of what a histogram gained between two scrapes, linear inside a bucket; null when it gained nothing.
function quantile(before, now, name, share) {
  const bounds = labelValues(now, name + "_bucket", "le").filter((le) => le !== "+Inf");
  bounds.sort((a, b) => Number(a) - Number(b));
  const gained = (le) => total(now, name + "_bucket", { le }) - total(before, name + "_bucket", { le });
  const count = gained("+Inf");
  if (!(count > 0)) return null;
  let low = 0, below = 0;
  for (const le of bounds) {
    const up = gained(le);
    if (up >= share * count) {
      return low + (Number(le) - low) * (up > below ? (share * count - below) / (up - below) : 1);
    }
    low = Number(le);
    below = up;
  }
  return low;
}

const PHASES = ["draft", "schedule", "verify", "commit", "learn"];

// What the page shows of two scrapes, `seconds` apart. What cannot be said is null.
function figures(before, now, seconds) {
  const gain = (name, wanted) => total(now, name, wanted) - total(before, name, wanted);
  const ratio = (a, b) => (b > 0 ? a / b : null);
  const drafted = gain("dspark_spec_decode_num_draft_tokens_total");
  const blocks = gain("dspark_spec_decode_num_drafts_total");
  const anchors = gain("dspark_spec_verify_tokens_total") - drafted;
  const allBlocks = total(now, "dspark_spec_decode_num_drafts_total");
  const perPosition = "dspark_spec_decode_num_accepted_tokens_per_pos_total";
  return {
    running: total(now, "dspark_num_requests_running"),
    waiting: total(now, "dspark_num_requests_waiting"),
    cache: total(now, "dspark_kv_cache_usage"),
    tokensPerSecond: gain("dspark_generation_tokens_total") / seconds,
    acceptedLength: blocks > 0 ? 1 + gain("dspark_spec_decode_num_accepted_tokens_total") / blocks : null,
    verifyLength: ratio(drafted, anchors),
    ttft: quantile(before, now, "dspark_time_to_first_token_seconds", 0.5),
    perToken: quantile(before, now, "dspark_time_per_output_token_seconds", 0.5),
    costModelError: now.dspark_cost_model_error ? total(now, "dspark_cost_model_error") : null,
    // Since the start of the server:
    positions: labelValues(now, perPosition, "position").map((position) => ({
      position: Number(position),
      share: ratio(total(now, perPosition, { position }), allBlocks),
    })),
    reliability: labelValues(now, "dspark_reliability_drafts_total", "bin").map((bin) => {
      const drafts = total(now, "dspark_reliability_drafts_total", { bin });
      return {
        forecast: total(now, "dspark_reliability_confidence_total", { bin }) / drafts,
        accepted: total(now, "dspark_reliability_accepted_total", { bin }) / drafts,
        drafts,
      };
    }),
    phases: PHASES.map((phase) => ({
      phase,
      seconds: ratio(total(now, "dspark_step_seconds_sum", { phase }), total(now, "dspark_step_seconds_count", { phase })),
    })),
  };
}

if (typeof module !== "undefined") module.exports = { parseMetrics, total, labelValues, quantile, figures };
