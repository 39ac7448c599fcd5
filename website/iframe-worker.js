// Search in pages that are opened as files. Browsers refuse to start a web worker from a file, so the worker's script runs in a
// hidden frame with the interface of a worker: messages in both directions, in order.
if (location.protocol === "file:") {
  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.waiting = []; // messages sent before the script has loaded
      this.onmessage = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.body.append(frame);
      this.frame = frame;
      const inner = frame.contentWindow;
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.onmessage?.(event);
        this.dispatchEvent(event);
      };
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      script.onload = () => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      };
      script.onerror = () => this.dispatchEvent(new Event("error"));
      frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      if (this.waiting) {
        this.waiting.push(data);
        return;
      }
      const event = new MessageEvent("message", { data });
      this.frame.contentWindow.dispatchEvent(event);
    }

    terminate() {
      this.frame.remove();
    }
  }
  window.Worker = window.IFrameWorker = FrameWorker;
}
