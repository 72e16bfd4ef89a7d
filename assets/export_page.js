/* The exported page: draws the embedded boards, one for the whole span and one per target token, and switches between
   them when a target is picked. */

const { boards: drawings, spans } = JSON.parse(document.getElementById("boards").textContent);
const parentElement = document.getElementById("mount");

let current = 0;

function draw(which) {
  current = which;
  mount({
    data: drawings[which],
    parentElement,
    setStateValue: (_, { start, stop }) => {
      const exact = spans.findIndex((span) => span[0] === start && span[1] === stop);
      const inside = spans.findIndex((span) => span[0] <= start && start < span[1] && span[1] - span[0] === 1);
      draw(exact >= 0 ? exact : inside >= 0 && stop - start === 1 ? inside : 0);
    },
  });
}

draw(0);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(current));
