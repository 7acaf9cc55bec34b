// The engine's state, asked for once a second while somebody looks.

const HISTORY = 120;
const series = { running: [], waiting: [], cache: [], speed: [] };

function drawLine(name, most) {
  const values = series[name];
  const high = Math.max(most, ...values);
  const points = values.map((value, index) => `${HISTORY - values.length + index + 1},${(26 - (24 * value) / high).toFixed(1)}`);
  document.querySelector(`#${name}-line polyline`).setAttribute("points", points.join(" "));
}

function showFigure(name, value, text, most = 1) {
  const values = series[name];
  values.push(value);
  if (values.length > HISTORY) values.shift();
  document.getElementById(name).textContent = text;
  drawLine(name, most);
}

function setState(state, text) {
  document.getElementById("state").dataset.state = state;
  document.getElementById("state-text").textContent = text;
}

function showLoad(load) {
  const cache = load.num_blocks ? 100 * (1 - load.num_free_blocks / load.num_blocks) : 0;
  showFigure("running", load.num_running, String(load.num_running));
  showFigure("waiting", load.num_waiting, String(load.num_waiting));
  showFigure("cache", cache, `${cache.toFixed(cache < 10 ? 1 : 0)} %`, 100);
  showFigure("speed", load.tokens_s, Math.round(load.tokens_s).toLocaleString("en"));
  document.getElementById("brief").textContent = `${load.num_running} running`;
}

function showReplicas(replicas) {
  const list = document.getElementById("replicas");
  list.hidden = !replicas.length;
  list.replaceChildren(...replicas.map((one, index) => {
    const line = document.createElement("li");
    line.textContent = `Replica ${index}: ${one.death ?? `${one.num_running} running, ${one.num_waiting} waiting`}`;
    return line;
  }));
  const dead = replicas.filter((one) => one.death !== null).length;
  return dead ? `${replicas.length - dead} of ${replicas.length} replicas ready` : "ready";
}

async function watchEngine(headers) {
  for (;;) {
    try {
      const [load, ready, health] = await Promise.all(["load", "ready", "health"].map((path) => fetch(path, { headers: headers() })));
      let text = "ready";
      if (load.ok) {
        const now = await load.json();
        showLoad(now);
        text = showReplicas(now.replicas ?? []);
      }
      if (ready.ok) setState("ready", text);
      else setState("bad", health.ok ? "not ready" : "the engine has ended");
    } catch {
      setState("bad", "no connection");
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
    while (document.hidden) {
      await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    }
  }
}
